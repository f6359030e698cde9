#include "step.h"

#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>

#include "errors.h"
#include "files.h"
#include "machine.h"

namespace llmc {
namespace {

namespace ffi = tvm::ffi;

constexpr DLDevice kCpu = {kDLCPU, 0};
constexpr DLDataType kInt32 = {kDLInt, 32, 1}, kFloat32 = {kDLFloat, 32, 1};
constexpr int kNaive = 1;    // tvm::runtime::memory::AllocatorType; a pool would keep buffers of every number of rows
constexpr int kAnyCore = 0;  // mode of runtime.config_threadpool: neither big nor little cores
constexpr size_t kAlign = 64;

// A tensor over memory that stays where it is for longer than the tensor.
ffi::Tensor borrowed(void* data, const std::vector<int64_t>& shape, DLDataType type) {
  struct Borrowed {
    DLManagedTensor managed;
    std::vector<int64_t> shape;
  };
  auto* own = new Borrowed{{}, shape};
  own->managed.dl_tensor = {data, kCpu, int32_t(shape.size()), type, own->shape.data(), nullptr, 0};
  own->managed.manager_ctx = own;
  own->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Borrowed*>(self->manager_ctx); };
  return ffi::Tensor::FromDLPack(&own->managed, kAlign, true);
}

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + kAlign) / kAlign * kAlign;
    tensor->data = std::aligned_alloc(kAlign, bytes);
    if (!tensor->data) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor copied(const std::vector<int32_t>& values, std::vector<int64_t> shape) {
  ffi::Tensor tensor =
      ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()), kInt32, kCpu);
  std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(int32_t));
  return tensor;
}

ffi::Tensor copied(const std::vector<int32_t>& values) { return copied(values, {int64_t(values.size())}); }

// The numbers of an output, which must be (rows, columns), or (rows,) where columns is 0.
template <typename T>
const T* data_of(const ffi::Tensor& tensor, int64_t rows, int64_t columns, DLDataType type) {
  bool fits = tensor.ndim() == (columns ? 2 : 1) && tensor.size(0) == rows && (!columns || tensor.size(1) == columns);
  fits = fits && tensor.dtype() == type && tensor.IsContiguous() && tensor.device().device_type == kDLCPU;
  if (!fits) throw Error(LLMC_FAILED, "the compiled step gave an array of another shape than its format says");
  return static_cast<const T*>(tensor.data_ptr()) + tensor.byte_offset() / sizeof(T);
}

// The TVM runtime that something else loaded into this process, or nothing.
std::string mapped_runtime() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    std::string path = line.substr(slash), name = "/libtvm_runtime.so";
    if (path.size() >= name.size() && path.compare(path.size() - name.size(), name.size(), name) == 0) return path;
  }
  return "";
}

// Load the artifact's copy of TVM's runtime, globally, because its library looks for the thread pool there. A process
// has one runtime: another artifact must have the same.
void load_runtime(const std::string& path, const std::string& sha256) {
  static std::string loaded;  // its SHA-256
  if (loaded.empty()) {
    std::string mapped = mapped_runtime();
    if (!mapped.empty()) loaded = file_sha256(mapped);
  }
  if (loaded.empty()) {
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      throw ArtifactError(shown(path) + ": cannot be loaded: " + shown(dlerror()));
    }
    loaded = sha256;
  }
  if (loaded != sha256) {
    throw ArtifactError(shown(path) +
                        ": this process already runs another version of TVM's runtime; use this artifact " +
                        "in a process of its own, or compile both with one llmc");
  }
}

// Works only before the first pool of threads starts: TVM would take half of the cores and bind this thread to one.
void allow_threads(int threads) {
  const char* set = std::getenv("TVM_NUM_THREADS");
  int most = std::max({threads, default_threads(), set ? std::atoi(set) : 0});
  setenv("TVM_BIND_THREADS", "0", 1);
  setenv("TVM_NUM_THREADS", std::to_string(most).c_str(), 1);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "3000", 0);  // about a millisecond, a hundredth of what it would be
}

std::mutex process_lock;

}  // namespace

struct Step::Loaded {
  ffi::Module library, executable;
  ffi::Function step, configure_threads;
  ffi::Array<ffi::Tensor> kv, weights;
  size_t groups;
  int threads;
  int64_t vocab;
};

Step::Step(const std::string& folder, const Manifest& manifest, const Variant& variant,
           const std::vector<std::string>& identities, const PagePool& pool, const std::vector<WeightView>& weights,
           int threads) {
  std::lock_guard<std::mutex> guard(process_lock);
  std::string runtime = folder + "/" + manifest.runtime, library = folder + "/" + variant.file;
  if (identity(runtime) != identities.at(0) || identity(library) != identities.at(1)) fail_changed(folder);
  allow_threads(threads);
  load_runtime(runtime, manifest.files.at(manifest.runtime).sha256);
  try {
    ffi::Module module = ffi::Module::LoadFromFile(library);
    ffi::Module executable = module->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
    executable->GetFunction("vm_initialization").value()(int(kDLCPU), 0, kNaive);
    ffi::Function step = executable->GetFunction("step").value();
    ffi::Function configure = ffi::Function::GetGlobalRequired("runtime.config_threadpool");
    loaded_.reset(new Loaded{module, executable, step, configure, {}, {}, manifest.kv.groups, threads, manifest.vocab});
  } catch (const std::exception& error) {
    throw ArtifactError(shown(library) + ": cannot be loaded (made by tvm " + shown(manifest.tvm) +
                        "): " + shown(error.what()));
  }
  const KvLayout& kv = manifest.kv;
  uint8_t bits = uint8_t(8 * kv.element_bytes());
  DLDataType type = {uint8_t(bits == 32 ? kDLFloat : kDLUInt), bits, 1};
  std::vector<int64_t> shape = {pool.num_pages()};
  shape.insert(shape.end(), kv.page_shape.begin(), kv.page_shape.end());
  for (const ZeroedMemory& layer : pool.layers()) loaded_->kv.push_back(borrowed(layer.data(), shape, type));
  for (const WeightView& weight : weights) {
    loaded_->weights.push_back(borrowed(weight.data, weight.shape, {weight.type_code, weight.bits, 1}));
  }
}

Step::~Step() = default;

StepOutput Step::run(const StepArrays& arrays) {
  thread_local int configured = 0;  // TVM keeps one pool per calling thread
  if (configured != loaded_->threads) loaded_->configure_threads(kAnyCore, loaded_->threads);
  configured = loaded_->threads;

  int64_t sequences = int64_t(arrays.page_indptr.size()) - 1, rows = int64_t(arrays.logit_rows.size());
  std::vector<ffi::Any> arguments = {
      copied(arrays.tokens),
      copied(arrays.positions),
      copied(arrays.seqs),
      copied(arrays.slots),
      copied(std::vector<int32_t>(size_t(2 * sequences), 0), {sequences, 2}),  // no sequence has a hole
      copied(arrays.page_indptr)};
  for (size_t group = 0; group < loaded_->groups; ++group) arguments.push_back(copied(arrays.page_ids));
  arguments.insert(arguments.end(), {copied(arrays.logit_rows), loaded_->kv, loaded_->weights});
  std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
  ffi::Any result;
  loaded_->step.CallPacked(views.data(), int32_t(views.size()), &result);

  auto outputs = std::make_shared<ffi::Array<ffi::Any>>(result.cast<ffi::Array<ffi::Any>>());
  if (outputs->size() < 4) throw Error(LLMC_FAILED, "the compiled step gave fewer arrays than its format says");
  auto tensor = [&](int64_t index) { return (*outputs)[index].cast<ffi::Tensor>(); };
  int64_t candidates = tensor(1).ndim() == 2 ? tensor(1).size(1) : 0;
  StepOutput output;
  output.logits = data_of<float>(tensor(0), rows, loaded_->vocab, kFloat32);
  output.top_ids = data_of<int32_t>(tensor(1), rows, candidates, kInt32);
  output.top_values = data_of<float>(tensor(2), rows, candidates, kFloat32);
  output.normalizers = data_of<float>(tensor(3), rows, 0, kFloat32);
  output.owner = outputs;
  output.rows = rows, output.candidates = candidates, output.vocab = loaded_->vocab;
  return output;
}

}  // namespace llmc
