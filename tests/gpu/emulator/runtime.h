// Between the emulated libcudart (runtime.cc), the emulated libcuda (driver.cc) and the emulated libnccl (nccl.cc).

#pragma once

#include <functional>
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

// Have something run after what is on the stream; it gives 0, an error, or EMULATED_NOT_READY to be asked again.
constexpr int EMULATED_NOT_READY = 600;
int emulated_enqueue(void *stream, std::function<int()> work);

// Whether so many bytes are of one allocation of the device.
bool emulated_holds(const void *at, size_t bytes);

// Count something that tests ask for.
void emulated_add(const char *what);
