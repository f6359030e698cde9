// libnccl.so.2 for emulated devices: processes of one machine, a socket between each two. Signatures: nccl.h of NCCL 2.
//
// As with the real one, a group is one piece of work on the stream, which is done when all its pieces have been sent and
// received, be it never: of a process that has ended nobody tells. Messages between two ranks are taken in order.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime.h"

namespace {

enum : int { OK = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
constexpr int VERSION = 22800, BYTE = 1;

struct Id { char internal[128]; };

struct Communicator {
  int rank;
  std::vector<int> sockets;
  std::atomic<bool> aborted{false};
};

struct Piece {
  bool send;
  char *at;
  size_t bytes;
  int peer;
  size_t done;
};

struct Group {
  Communicator *communicator = nullptr;
  void *stream = nullptr;
  std::vector<Piece> pieces;
};

thread_local int depth;
thread_local Group group;

socklen_t address_of(const Id &id, int rank, sockaddr_un &address) {
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;  // a name of Linux's own, which is gone with the process
  int length = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "%.64s-%d", id.internal, rank);
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
}

bool whole(int from, int *value) { return recv(from, value, sizeof *value, MSG_WAITALL) == sizeof *value; }

// What the group sends to its own rank goes to what it receives from there, in order. False: they are not as many.
bool to_itself(Group &group) {
  std::vector<Piece *> sent, received;
  for (Piece &piece : group.pieces)
    if (piece.peer == group.communicator->rank) (piece.send ? sent : received).push_back(&piece);
  if (sent.size() != received.size()) return false;
  for (size_t i = 0; i < sent.size(); i++) {
    if (sent[i]->bytes != received[i]->bytes) return false;
    memcpy(received[i]->at, sent[i]->at, sent[i]->bytes);
    sent[i]->done = received[i]->done = sent[i]->bytes;
  }
  return true;
}

// Sends or receives what it can; whether all of the piece has been.
bool advance(Communicator &communicator, Piece &piece) {
  int way = communicator.sockets[piece.peer];
  while (piece.done < piece.bytes) {
    char *at = piece.at + piece.done;
    size_t left = piece.bytes - piece.done;
    ssize_t moved = piece.send ? send(way, at, left, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(way, at, left, MSG_DONTWAIT);
    if (moved <= 0) return false;
    piece.done += moved;
  }
  return true;
}

int put(bool send, const void *at, size_t count, int type, int peer, void *communicator, void *stream) {
  auto *own = static_cast<Communicator *>(communicator);
  if (type != BYTE || peer < 0 || peer >= int(own->sockets.size())) return INVALID_ARGUMENT;
  if (!depth || !emulated_holds(at, count)) return INVALID_USAGE;
  group.communicator = own, group.stream = stream;
  group.pieces.push_back({send, static_cast<char *>(const_cast<void *>(at)), count, peer, 0});
  return OK;
}

}  // namespace

extern "C" {

int ncclGetVersion(int *version) { return *version = VERSION, OK; }
const char *ncclGetErrorString(int) { return "emulated error"; }

int ncclGetUniqueId(Id *id) {
  static int number;
  memset(id, 0, sizeof *id);
  return snprintf(id->internal, sizeof id->internal, "llmc-nccl-%d-%d", getpid(), number++), OK;
}

int ncclCommInitRank(void **made, int size, Id id, int rank) {
  if (getenv("LLMC_EMULATED_NCCL")) return SYSTEM_ERROR;  // of tests: something that NCCL wants is not there
  auto *own = new Communicator;
  own->rank = rank;
  own->sockets.assign(size, -1);
  sockaddr_un address;
  int door = socket(AF_UNIX, SOCK_STREAM, 0);
  socklen_t length = address_of(id, rank, address);
  if (bind(door, reinterpret_cast<sockaddr *>(&address), length) || listen(door, size)) return SYSTEM_ERROR;
  for (int peer = 0; peer < rank; peer++) {
    int way = socket(AF_UNIX, SOCK_STREAM, 0);
    length = address_of(id, peer, address);
    while (connect(way, reinterpret_cast<sockaddr *>(&address), length)) usleep(1000);
    if (send(way, &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank) return SYSTEM_ERROR;
    own->sockets[peer] = way;
  }
  for (int left = size - 1 - rank; left; left--) {
    int way = accept(door, nullptr, nullptr), peer = -1;
    if (way < 0 || !whole(way, &peer) || peer <= rank || peer >= size) return SYSTEM_ERROR;
    own->sockets[peer] = way;
  }
  close(door);
  return *made = own, OK;
}

int ncclCommAbort(void *communicator) {
  emulated_add("aborts");
  return static_cast<Communicator *>(communicator)->aborted = true, OK;
}
int ncclCommGetAsyncError(void *, int *status) { return *status = OK, OK; }

int ncclGroupStart() { return depth++, OK; }
int ncclSend(const void *at, size_t count, int type, int peer, void *communicator, void *stream) {
  return put(true, at, count, type, peer, communicator, stream);
}
int ncclRecv(void *at, size_t count, int type, int peer, void *communicator, void *stream) {
  return put(false, at, count, type, peer, communicator, stream);
}
int ncclGroupEnd() {
  if (--depth || group.pieces.empty()) return OK;
  auto work = std::make_shared<Group>(std::move(group));
  group = Group();
  return emulated_enqueue(work->stream, [work]() -> int {
    if (!to_itself(*work)) return INVALID_USAGE;
    bool done = true;
    for (Piece &piece : work->pieces) done = advance(*work->communicator, piece) && done;
    if (!done && !work->communicator->aborted) return EMULATED_NOT_READY;
    for (Piece &piece : work->pieces) piece.done = 0;  // a captured group comes again
    emulated_add("exchanges");
    return OK;
  });
}

}  // extern "C"
