// What TVM's CUDA source includes; device.h has all that it needs of it.
