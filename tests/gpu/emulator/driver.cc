// libcuda.so.1 without a GPU: modules are shared objects that g++ made of CUDA source (device.h). Signatures: cuda.h, 13.

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "runtime.h"

namespace {

enum : int { OK = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_SOURCE = 300, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

struct Function {
  Launch::Run run;
  std::string name;
  const unsigned char *sizes;  // of each argument, then 0
};
struct Module {
  void *library;
  std::map<std::string, Function> functions;
};
struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
};

size_t elf_bytes(const void *image) {
  auto *header = static_cast<const Elf64_Ehdr *>(image);
  if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return 0;
  return header->e_shoff + size_t(header->e_shnum) * header->e_shentsize;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int number) { return *device = number, number ? 101 : OK; }
int cuDeviceGetName(char *name, int bytes, int) { return snprintf(name, bytes, "emulated"), OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return emulated_attribute(value, attribute, device); }
int cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR", OK; }
int cuGetErrorString(int, const char **text) { return *text = "an error of the emulated driver", OK; }
int cuFuncSetAttribute(void *, int, int) { return OK; }
int cuTensorMapEncodeTiled() { return NOT_SUPPORTED; }

int cuModuleLoadData(void **module, const void *image) {
  size_t bytes = elf_bytes(image);
  if (!bytes) return INVALID_IMAGE;
  int file = memfd_create("kernels", 0);
  if (write(file, image, bytes) != ssize_t(bytes)) return close(file), INVALID_SOURCE;
  std::string path = "/proc/self/fd/" + std::to_string(file);
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // the file stays open: dlopen knows libraries by name
  if (!library) return fprintf(stderr, "%s\n", dlerror()), INVALID_IMAGE;
  return *module = new Module{library, {}}, OK;
}

int cuModuleUnload(void *module) {
  delete static_cast<Module *>(module);
  return OK;
}

int cuModuleGetFunction(void **function, void *handle, const char *name) {
  auto *module = static_cast<Module *>(handle);
  auto run = reinterpret_cast<Launch::Run>(dlsym(module->library, "llmc_run"));
  auto *sizes = static_cast<const unsigned char *>(dlsym(module->library, (std::string("llmc_sizes_") + name).c_str()));
  if (!run || !sizes) return NOT_FOUND;
  return *function = &(module->functions[name] = {run, name, sizes}), OK;
}

int cuLaunchKernelEx(const LaunchConfig *config, void *handle, void **arguments, void **) {
  auto *function = static_cast<Function *>(handle);
  Launch launch{function->run, function->name, {}, {}, {}};
  for (int axis = 0; axis < 3; axis++) {
    launch.grid[axis] = config->grid[axis];
    launch.block[axis] = config->block[axis];
    if (!config->grid[axis] || !config->block[axis] || (axis && config->grid[axis] > 65535)) return INVALID_VALUE;
  }
  for (size_t number = 0; function->sizes[number]; number++) {
    auto *first = static_cast<const char *>(arguments[number]);
    launch.arguments.emplace_back(first, first + function->sizes[number]);
  }
  return emulated_launch(launch, config->stream);
}

}  // extern "C"

// CU_DEVICE_ATTRIBUTE_*: what TVM and llmc ask for. The chip is LLMC_EMULATED_CHIP, such as 80; sm_80 without it.
int emulated_attribute(int *value, int attribute, int device) {
  const char *chip = getenv("LLMC_EMULATED_CHIP");
  int compute = chip ? atoi(chip) : 80;
  static const std::map<int, int> known = {
      {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7fffffff}, {6, 65535}, {7, 65535}, {8, 48 << 10}, {10, 32},
      {12, 65536}, {13, 1000000}, {16, 8}, {38, 1 << 20}, {39, 2048}, {97, 99 << 10}};
  if (device) return 101;
  auto found = known.find(attribute);
  *value = attribute == 75 ? compute / 10 : attribute == 76 ? compute % 10 : found == known.end() ? 0 : found->second;
  return OK;
}
