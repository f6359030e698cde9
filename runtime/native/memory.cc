#include "memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <vector>

namespace llmc {
namespace {

constexpr long long kKilobyte = 1024;

// Files of a control group: its limit, what it uses, and what of that are files that can be let go.
struct GroupKind {
  std::string folder, limit, used;
  std::set<std::string> files;
};

const GroupKind kGroupKinds[] = {
    {"sys/fs/cgroup/", "memory.max", "memory.current", {"active_file", "inactive_file"}},
    {"sys/fs/cgroup/memory/",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_active_file", "total_inactive_file"}},
};

long long of_system(const std::string& root) {
  std::ifstream file(root + "proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    long long kilobytes = 0;
    if (words >> name >> kilobytes && name == "MemAvailable:") return kilobytes * kKilobyte;
  }
  return (long long)memory_bytes();
}

// Folders of groups, below where all are, that this process may be in: those named, and the ones that they are in.
std::set<std::string> groups(const std::string& root) {
  std::set<std::string> found = {""};  // in a container the group's own name is often not that of a folder there
  std::ifstream file(root + "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string kinds = "," + line.substr(first + 1, second - first - 1) + ",", name = line.substr(second + 1);
    if (kinds != ",," && kinds.find(",memory,") == std::string::npos) continue;
    name.erase(0, name.find_first_not_of('/'));
    for (; !name.empty(); name.erase(name.find('/') == std::string::npos ? 0 : name.rfind('/'))) {
      found.insert(name + "/");
    }
  }
  return found;
}

// The sum of the numbers that are named, in a file of names and numbers.
long long listed(const std::string& path, const std::set<std::string>& names) {
  std::ifstream file(path);
  std::string name;
  long long number = 0, sum = 0;
  while (file >> name >> number) sum += names.count(name) ? number : 0;
  return sum;
}

}  // namespace

size_t memory_bytes() { return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGE_SIZE)); }

size_t available_bytes(const std::string& root) {
  long long available = of_system(root);
  for (const GroupKind& kind : kGroupKinds) {
    for (const std::string& group : groups(root)) {
      std::string folder = root + kind.folder + group;
      std::ifstream limit(folder + kind.limit), used(folder + kind.used);
      long long most = 0, now = 0;
      if (!(limit >> most) || !(used >> now)) continue;  // "max" is no number
      available = std::min(available, most - now + listed(folder + "memory.stat", kind.files));
    }
  }
  return size_t(std::max(available, 0LL));
}

}  // namespace llmc
