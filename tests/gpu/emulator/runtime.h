// Between the emulated libcudart (runtime.cc) and the emulated libcuda (driver.cc).

#pragma once

#include <string>
#include <vector>

struct Launch {
  using Run = const char *(*)(const char *kernel, const unsigned *grid, const unsigned *block, void **arguments);
  Run run;
  std::string name;
  unsigned grid[3], block[3];
  std::vector<std::vector<char>> arguments;
};

// Have a kernel run after what is on the stream; 0 or an error. The stream is runtime.cc's.
int emulated_launch(const Launch &launch, void *stream);

// A device attribute by its number in cuda.h, which is that of the runtime's too.
int emulated_attribute(int *value, int attribute, int device);

// The error of a kernel that failed, or 0.
int emulated_failure();
