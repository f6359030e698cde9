// What this machine's CPU can do, and how many of its cores this process may use.

#pragma once

#include <set>
#include <string>
#include <vector>

namespace llmc {

// The architecture as the kernel names it, such as x86_64.
std::string cpu_arch();

// CPU flags in lower case, as /proc/cpuinfo spells them; empty where there are none.
std::set<std::string> cpu_flags();

// What of `arch` and `requires_flags` this machine lacks; empty when it has all.
std::vector<std::string> missing_flags(const std::string& arch, const std::vector<std::string>& requires_flags);

// CPUs this process may use: its affinity mask, cut by the quota of its control group.
int default_threads();

}  // namespace llmc
