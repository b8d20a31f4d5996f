// A driver without a GPU: memory is the host's, copies are real, kernels do nothing, and every call that
// orders work is written to the file that GPU_CALLS names. What a GPU would compute is not known here; how
// it is asked is. GPU_COUNT: so many GPUs, else one. GPU_GRAPHS=refuse: it makes no graph of what it recorded.
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "streams.h"

#define record recording_write

struct CUfunc_st { char name[200]; };
struct CUevent_st { int is_timed, is_seen; struct recording_event *event; };
struct CUgraph_st { CUstream stream; unsigned starts; int is_broken; };
struct CUgraphExec_st { unsigned starts; };

// What this thread records in place of running it: kernels, and nothing else. Whatever else it asks for meanwhile is refused.
static _Thread_local CUgraph recorded;
static CUresult refused(const char *call) {
  record("refused %s\n", call);
  recorded->is_broken = 1;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
#define NOT_RECORDED(call) if (recorded) return refused(call)

// Page-locked memory that is there.
static struct { char *from, *to; } pinned[16];

static _Atomic uintptr_t handles = 0x1000;
static _Atomic uint64_t used, used_high;

static void *handle(void) { return (void *)(handles += 16); }

static struct recording_stream *stream_of(CUstream stream) {
  static struct recording_stream *of_all;
  if (stream) return (struct recording_stream *)stream;
  if (!of_all) of_all = recording_stream_new();
  return of_all;
}
static int gpus(void) { return getenv("GPU_COUNT") ? atoi(getenv("GPU_COUNT")) : 1; }

// The device.
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = gpus(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return index < 0 || index >= gpus() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  snprintf(name, length, "recording driver");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 7, sizeof *uuid);
  uuid->bytes[0] += device;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = 8ull << 30; return CUDA_SUCCESS; }
CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
  *total = 8ull << 30;
  *available = *total - used;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = handle(); return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = 0; return CUDA_SUCCESS; }
// NVRTC asks a driver for more, and goes on without.
CUresult cuGetExportTable(const void **table, const CUuuid *id) { *table = 0; return CUDA_ERROR_NOT_FOUND; }
CUresult cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
  *address = 0;
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetErrorName(CUresult error, const char **name) { *name = "ERROR"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "an error"; return CUDA_SUCCESS; }

// Order: streams and events.
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  *stream = (CUstream)recording_stream_new();
  record("stream %p %u\n", (void *)*stream, flags);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
CUresult cuStreamSynchronize(CUstream stream) {
  NOT_RECORDED("synchronise");
  record("synchronise %p\n", (void *)stream);
  recording_stream_synchronise(stream_of(stream));
  return CUDA_SUCCESS;
}
// Which stream waits, and for which.
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  NOT_RECORDED("wait");
  record("wait %p %p\n", (void *)stream, (void *)recording_event_stream(event->event));
  recording_stream_wait(stream_of(stream), event->event);
  return CUDA_SUCCESS;
}
// An event that takes the time is a mark.
CUresult cuEventCreate(CUevent *event, unsigned flags) {
  *event = calloc(1, sizeof **event);
  (*event)->is_timed = !(flags & CU_EVENT_DISABLE_TIMING);
  (*event)->event = recording_event_new();
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy_v2(CUevent event) {
  recording_event_free(event->event);
  free(event);
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  NOT_RECORDED("event");
  record("%s %p\n", event->is_timed ? "mark" : "event", (void *)stream);
  event->is_seen = 0;
  recording_event_record(event->event, stream_of(stream));
  return CUDA_SUCCESS;
}
// That the host knows a stream to have come so far is written once.
static CUresult look(CUevent event, int waits) {
  NOT_RECORDED("look");
  if (!recording_event_is_done(event->event, waits)) return CUDA_ERROR_NOT_READY;
  if (!event->is_timed && !event->is_seen) record("seen %p\n", (void *)recording_event_stream(event->event));
  event->is_seen = 1;
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) { return look(event, 0); }
CUresult cuEventSynchronize(CUevent event) { return look(event, 1); }
CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to) {
  double at_first = recording_event_ms(from->event), at_last = recording_event_ms(to->event);
  if (!from->is_timed || !to->is_timed || !at_first || !at_last) return CUDA_ERROR_INVALID_HANDLE;
  *ms = at_last - at_first;
  return CUDA_SUCCESS;
}
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) { return cuEventElapsedTime_v2(ms, from, to); }

// Memory: zeros, since no kernel writes results.
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
  NOT_RECORDED("allocate");
  record("allocate %p %zu\n", (void *)stream, bytes);
  *address = 0;
  // A pool has an address for nothing.
  if (!bytes) return CUDA_SUCCESS;
  size_t *block = calloc(1, bytes + 64);
  if (!block) return CUDA_ERROR_OUT_OF_MEMORY;
  *block = bytes;
  uint64_t now = used += bytes;
  if (now > used_high) used_high = now;
  *address = (CUdeviceptr)block + 64;
  return CUDA_SUCCESS;
}
// Whoever reads it later finds no numbers.
static void release(struct recording_work *work) {
  size_t *block = work->to, bytes = *block;
  memset((char *)block + 64, 0xff, bytes < 4096 ? bytes : 4096);
  free(block);
}
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  if (!address) return CUDA_SUCCESS;
  NOT_RECORDED("free");
  size_t *block = (size_t *)(address - 64);
  record("free %p %zu\n", (void *)stream, *block);
  used -= *block;
  recording_submit(stream_of(stream), (struct recording_work){.run = release, .to = block}, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  return bytes ? cuMemAllocAsync(address, bytes, 0) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemFree_v2(CUdeviceptr address) { return cuMemFreeAsync(address, 0); }
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  record("pinned %zu\n", bytes);
  char *block = malloc(bytes);
  *address = block;
  for (int i = 0; block && i < 16; i++)
    if (!pinned[i].from) {
      pinned[i].from = block;
      pinned[i].to = block + bytes;
      break;
    }
  return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static int is_pinned(const void *address) {
  for (int i = 0; i < 16; i++)
    if (pinned[i].from && (char *)address >= pinned[i].from && (char *)address < pinned[i].to) return 1;
  return 0;
}
CUresult cuMemFreeHost(void *address) {
  for (int i = 0; i < 16; i++)
    if (pinned[i].from == address) pinned[i].from = 0;
  free(address);
  return CUDA_SUCCESS;
}
static void copy(struct recording_work *work) { memmove(work->to, work->from, work->bytes); }
static void copy_staged(struct recording_work *work) {
  copy(work);
  free((void *)work->from);
}
static void fill(struct recording_work *work) { memset(work->to, work->value, work->bytes); }
// The caller's memory is its own again, but for page-locked memory.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  NOT_RECORDED("upload");
  record("upload %p %zu\n", (void *)stream, bytes);
  struct recording_work work = {.run = copy, .to = (void *)to, .from = from, .bytes = bytes};
  if (!is_pinned(from)) {
    work.run = copy_staged;
    work.from = memcpy(malloc(bytes + 1), from, bytes);
  }
  recording_submit(stream_of(stream), work, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { return cuMemcpyHtoDAsync_v2(to, from, bytes, 0); }
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NOT_RECORDED("download");
  record("download %p %zu %s\n", (void *)stream, bytes, is_pinned(to) ? "pinned" : "pageable");
  recording_submit(stream_of(stream), (struct recording_work){.run = copy, .to = to, .from = (void *)from, .bytes = bytes}, 0);
  if (!is_pinned(to)) recording_stream_synchronise(stream_of(stream));
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { return cuMemcpyDtoHAsync_v2(to, from, bytes, 0); }
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NOT_RECORDED("copy");
  record("copy %p %zu\n", (void *)stream, bytes);
  recording_submit(stream_of(stream), (struct recording_work){.run = copy, .to = (void *)to, .from = (void *)from, .bytes = bytes}, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  NOT_RECORDED("fill");
  record("fill %p %zu\n", (void *)stream, bytes);
  recording_submit(stream_of(stream), (struct recording_work){.run = fill, .to = (void *)to, .bytes = bytes, .value = value}, 0);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) { *pool = (CUmemoryPool)1; return CUDA_SUCCESS; }
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) { return cuDeviceGetMemPool(pool, device); }
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  record("pool %d %llu\n", attribute, *(unsigned long long *)value);
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) used_high = used;
  return CUDA_SUCCESS;
}
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  *(uint64_t *)value = attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? used_high : (uint64_t)used;
  return CUDA_SUCCESS;
}

// Kernels.
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  NOT_RECORDED("load");
  *module = handle();
  return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { *module = handle(); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = calloc(1, sizeof **function);
  strncpy((*function)->name, name, sizeof (*function)->name - 1);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) { *value = 64; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int threads, size_t shared) {
  *blocks = 1;
  return CUDA_SUCCESS;
}
static void nothing(struct recording_work *work) {}
// As a driver does, it refuses what no GPU can start.
CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                        unsigned threads_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
  int is_recorded = recorded && recorded->stream == stream;
  record("%s %p %u %u %u %u %s\n", is_recorded ? "start" : "launch", (void *)stream, x, y, z,
         threads_x * threads_y * threads_z, function->name);
  unsigned threads = threads_x * threads_y * threads_z;
  if (!x || !y || !z || y > 65535 || z > 65535 || !threads || threads > 1024 || shared > 227 << 10)
    return CUDA_ERROR_INVALID_VALUE;
  if (is_recorded) {
    recorded->starts++;
    return CUDA_SUCCESS;
  }
  recording_submit(stream_of(stream), (struct recording_work){.run = nothing}, 0);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return CUDA_ERROR_INVALID_VALUE;
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                        config->blockDimZ, config->sharedMemBytes, config->hStream, arguments, extra);
}

// Graphs: starts that were recorded, made by one call.
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  NOT_RECORDED("record");
  record("record %p %d\n", (void *)stream, mode);
  recorded = calloc(1, sizeof *recorded);
  recorded->stream = stream;
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  *graph = 0;
  if (!recorded || recorded->stream != stream) return CUDA_ERROR_ILLEGAL_STATE;
  CUgraph made = recorded;
  recorded = 0;
  if (made->is_broken) {
    free(made);
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  *graph = made;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  if (getenv("GPU_GRAPHS")) return CUDA_ERROR_NOT_SUPPORTED;
  record("made %u\n", graph->starts);
  *exec = calloc(1, sizeof **exec);
  (*exec)->starts = graph->starts;
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  NOT_RECORDED("graph");
  record("graph %p %u\n", (void *)stream, exec->starts);
  recording_submit(stream_of(stream), (struct recording_work){.run = nothing}, 0);
  return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
  record("dropped %u\n", exec->starts);
  free(exec);
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
  free(graph);
  return CUDA_SUCCESS;
}
