#include "machine.h"

#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

namespace llmc {
namespace {

std::string lower(std::string text) {
  for (char& c : text) c = char(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Ask the kernel for AMX tile state, for the whole process; asking again is harmless.
// https://docs.kernel.org/arch/x86/xstate.html
bool allow_amx() {
#if defined(__x86_64__)
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}

// CPUs of the control group's quota, rounded up, or 0 without one (cgroup v2 cpu.max, v1 cfs).
long quota() {
  long share = 0, of = 0;
  std::ifstream two("/sys/fs/cgroup/cpu.max");
  if (!(two >> share >> of)) {
    std::ifstream part("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), whole("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (two.is_open() || !(part >> share) || !(whole >> of)) return 0;
  }
  return share > 0 && of > 0 ? (share + of - 1) / of : 0;
}

}  // namespace

std::string cpu_arch() {
  utsname names;
  if (uname(&names) != 0) return "";
  std::string machine = names.machine;
  if (lower(machine) == "amd64") return "x86_64";
  return lower(machine) == "arm64" ? "aarch64" : machine;
}

#if defined(__aarch64__)

// From the auxiliary vector: /proc/cpuinfo has one core's, and under an emulator the host's.
// Bits: Linux, arch/arm64/include/uapi/asm/hwcap.h.
std::set<std::string> cpu_flags() {
  struct Flag {
    const char* name;
    unsigned long word;
    int bit;
  };
  static const Flag kFlags[] = {
      {"fp", AT_HWCAP, 0},       {"asimd", AT_HWCAP, 1}, {"fphp", AT_HWCAP, 9},  {"asimdhp", AT_HWCAP, 10},
      {"asimddp", AT_HWCAP, 20}, {"sve", AT_HWCAP, 22},  {"sve2", AT_HWCAP2, 1}, {"svei8mm", AT_HWCAP2, 9},
      {"i8mm", AT_HWCAP2, 13},   {"bf16", AT_HWCAP2, 14}};
  std::set<std::string> flags;
  for (const Flag& flag : kFlags) {
    if (getauxval(flag.word) >> flag.bit & 1) flags.insert(flag.name);
  }
  return flags;
}

#else

std::set<std::string> cpu_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    size_t colon = line.find(':');
    std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    if (colon == std::string::npos || (key != "flags")) continue;
    std::istringstream words(lower(line.substr(colon + 1)));
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    return flags;
  }
  return {};
}

#endif

std::vector<std::string> missing_flags(const std::string& arch, const std::vector<std::string>& requires_flags) {
  if (arch != cpu_arch()) return {"arch " + arch};
  std::set<std::string> flags = cpu_flags();
  std::vector<std::string> missing;
  for (const std::string& flag : requires_flags) {
    if (!flags.count(flag)) missing.push_back(flag);
  }
  bool amx = std::count(requires_flags.begin(), requires_flags.end(), "amx_tile") > 0;
  if (missing.empty() && amx && !allow_amx()) return {"amx_tile (the kernel refuses its state)"};
  return missing;
}

int default_threads() {
  cpu_set_t mask;
  long count = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : sysconf(_SC_NPROCESSORS_ONLN);
  long most = quota();
  return int(std::max(1L, most > 0 ? std::min(count, most) : count));
}

}  // namespace llmc
