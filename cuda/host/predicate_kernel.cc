#include "host/predicate_kernel.h"

#include "common/launch.h"
#include "common/predicate_work.h"
#include "common/status.h"
#include "host/program_request.h"
#include "masks.h"

namespace jaxflash {

Status PredicateKernel::compile(const GpuTraits& gpu,
                                std::shared_ptr<RuntimeKernel>* kernel) const {
  KernelRequest request = program_request(gpu, true, Math::kTF32);
  request.label = "predicate";
  request.kernel = "jaxflash::predicate_kernel<jaxflash::Program>";
  request.source = program_source(source_, "common/predicate_kernel.cuh");
  return RuntimeKernel::get(request, kernel);
}

Status PredicateKernel::load_new(int device, const GpuTraits& gpu, const void** handle) const {
  std::shared_ptr<RuntimeKernel> kernel;
  Status status = compile(gpu, &kernel);
  if (status.ok()) status = kernel->load(device, 0, handle);
  if (status.ok()) loaded_.push_back({device, *handle});
  return status;
}

Status PredicateKernel::launch(const void* handle, const PredicateParams& params,
                               CUstream_st* stream) {
  constexpr int kWarps = kPredicateThreads / 32;
  const int64_t across = (blocks_of(params.keys) + kPredicateBlocks - 1) / kPredicateBlocks;
  const int64_t warps = params.count * blocks_of(params.rows) * across;
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  if (blocks > kMaxGrid) return error_status("a mask of so many elements is not supported");
  Status status = clear_seen(params, stream);
  if (status.ok() && blocks > 0) {
    const Grid grid{static_cast<unsigned>(blocks)};
    status = cuda_status(jaxflash::launch(Kernel<PredicateParams>(handle), Start::kAfter, grid,
                                          kPredicateThreads, 0, stream, params),
                         "evaluating a mask");
  }
  return status.ok() ? find_intervals(params, stream) : status;
}

}  // namespace jaxflash
