// A simulated accelerator, as torch's PrivateUse1 backend: what a real one does late, this one does late too, and on purpose.
//
// Device memory is host memory that only the streams touch. A stream is a thread with a queue; every task on it sleeps for a set delay
// before it reads or writes, and holds addresses, not tensors, as a kernel does. The allocator caches by stream, like CUDA's, and
// poisons what is freed in the order of that stream, so that a copy without a fence meets poison. Pinned memory comes from torch's own
// caching host allocator, rounding and all. Whatever is not here is done by torch's fallback to the CPU, which waits.
//
// The rules that copies follow are those of CUDA, its traps among them: see copy_from and foreach_copy_.

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr c10::StreamId kStreams = 33;  // the default one, and as many as CUDA has in a pool
constexpr int kPoison = 0xDB;
constexpr int kFresh = 0xCD;
constexpr size_t kRound = 512;

// What tests set, and what they count. The first are in microseconds, yes or no, and copies.
struct Knobs {
  std::atomic<int64_t> delay{0}, pinned{1}, streams{1}, fail_after{-1}, fail_late{0};
  std::atomic<int64_t> copies{0}, grouped{0}, waits{0}, allocated{0};
  std::atomic<int64_t> contexts{0};  // a bit for each device that was made current by more than a guard that ends
};
Knobs& knobs() {
  static auto* made = new Knobs;
  return *made;
}

std::atomic<bool> forked{false};

void check_alive() {
  TORCH_CHECK(!forked, "the simulated device cannot be used in a forked process");
}

// --- streams and events ---------------------------------------------------------------------------

std::mutex failure_mutex;
std::string failure;  // of a task, until somebody synchronizes

void raise_failure() {
  std::string what;
  {
    std::lock_guard<std::mutex> hold(failure_mutex);
    what.swap(failure);
  }
  TORCH_CHECK(what.empty(), "the simulated device failed: ", what);
}

class Queue {
 public:
  Queue(DeviceIndex device, c10::StreamId id) : stream(Stream::UNSAFE, Device(kType, device), id) {}

  uint64_t push(std::function<void()> task) {
    check_alive();
    std::lock_guard<std::mutex> hold(mutex_);
    if (!running_) {
      running_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return ++pushed_;
  }

  // Work on memory, which comes late.
  uint64_t work(std::function<void()> task) {
    const auto delay = knobs().delay.load();
    if (delay == 0) return push(std::move(task));
    return push([delay, task = std::move(task)] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
      task();
    });
  }

  uint64_t position() {
    std::lock_guard<std::mutex> hold(mutex_);
    return pushed_;
  }

  bool reached(uint64_t position) {
    std::lock_guard<std::mutex> hold(mutex_);
    return done_ >= position;
  }

  void join(uint64_t position) {
    if (forked) return;
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return done_ >= position; });
  }

  const Stream stream;

 private:
  void run() {
    at::NoGradGuard no_grad;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        changed_.wait(hold, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      try {
        task();
      } catch (const c10::Error& error) {
        std::lock_guard<std::mutex> hold(failure_mutex);
        failure = error.what_without_backtrace();
      }
      std::lock_guard<std::mutex> hold(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t pushed_ = 0, done_ = 0;
  bool running_ = false;
};

Queue& queue(DeviceIndex device, c10::StreamId id) {
  static auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Queue>>;
    for (DeviceIndex device = 0; device < kDevices; ++device) {
      for (c10::StreamId id = 0; id < kStreams; ++id) made->push_back(std::make_unique<Queue>(device, id));
    }
    return made;
  }();
  TORCH_CHECK(device >= 0 && device < kDevices, "the simulated device has no index ", int(device));
  TORCH_CHECK(id >= 0 && id < kStreams, "the simulated device has no stream ", id);
  return *(*all)[device * kStreams + id];
}

Queue& queue(const Stream& stream) {
  return queue(stream.device_index(), stream.id());
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

Queue& current_queue(DeviceIndex device) {
  return queue(device, current_streams.at(device));
}

// A place in a queue; the stream has come by when all before it is done.
struct Mark {
  Queue* queue = nullptr;
  uint64_t at = 0;

  bool passed() const { return forked || queue == nullptr || queue->reached(at); }
};

void wait_on(Queue& waiter, Mark mark) {
  if (mark.queue == nullptr || mark.queue == &waiter) return;
  ++knobs().waits;
  waiter.push([mark] { mark.queue->join(mark.at); });
}

void synchronize(Queue& waited) {
  waited.join(waited.position());
  raise_failure();
}

// As cudaSetDevice since CUDA 12: it gives the device a context, which takes half a gigabyte of a GPU. Guards that end, and
// torch's maybeExchangeDevice, leave a device without one as it is.
void set_device(DeviceIndex index) {
  if (index != current_device) knobs().contexts |= int64_t{1} << index;
  current_device = index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override {
    Device old(kType, current_device);
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.type() == kType && index_of(device) < kDevices, "not a simulated device: ", device);
    set_device(index_of(device));
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Stream getStream(Device device) const override { return current_queue(index_of(device)).stream; }
  Stream getDefaultStream(Device device) const override { return queue(index_of(device), 0).stream; }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    TORCH_CHECK(knobs().streams, "this simulated device has one stream");
    static std::atomic<uint64_t> next{0};
    return queue(index_of(device), 1 + next++ % (kStreams - 1)).stream;
  }
  Stream exchangeStream(Stream stream) const override {
    auto& current = current_streams.at(stream.device_index());
    auto old = queue(stream.device_index(), current).stream;
    current = stream.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const Stream& stream) const override {
    auto& asked = queue(stream);
    return asked.reached(asked.position());
  }
  void synchronizeStream(const Stream& stream) const override { synchronize(queue(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (c10::StreamId id = 0; id < kStreams; ++id) synchronize(queue(index_of(Device(kType, device)), id));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    c10::getDeviceAllocator(kType)->recordStream(memory, stream);
  }

  // Those of CUDA make the stream's device current, and then the one before, by no guard (torch 2.8).
  static void visit(DeviceIndex device) {
    const auto before = current_device;
    set_device(device);
    set_device(before);
  }

  // An event is a mark; recorded again, it is another one, and who waits for the old one still does.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    TORCH_CHECK(knobs().streams, "this simulated device has no events");
    visit(stream.device_index());
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = Mark{&queue(stream), queue(stream).position()};
  }
  void block(void* event, const Stream& stream) const override {
    visit(stream.device_index());
    if (event) wait_on(queue(stream), *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Mark*>(event)->passed(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto mark = *static_cast<Mark*>(event);
    if (mark.queue) mark.queue->join(mark.at);
    raise_failure();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ---------------------------------------------------------------------------------------

// Freed memory is another tensor's at once, if that is made on the stream that it was made on: what that stream still has to do comes
// before what it is asked next. Other streams know nothing of it.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& instance();

  c10::DataPtr allocate(size_t nbytes) override {
    check_alive();
    const Device device(kType, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    auto& home = current_queue(current_device);
    const size_t size = (nbytes + kRound - 1) / kRound * kRound;
    std::lock_guard<std::mutex> hold(mutex_);
    retire();
    auto& free = free_[{&home, size}];
    Block* block;
    if (free.empty()) {
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, 4096, size) == 0, "the simulated device is out of memory");
      std::memset(memory, kFresh, size);
      block = new Block{memory, size, &home, {}};
    } else {
      block = free.back();
      free.pop_back();
    }
    count(current_device, static_cast<int64_t>(size));
    ++knobs().allocated;
    return {block->memory, block, &DeviceMemory::release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return true; }

  void recordStream(const c10::DataPtr& memory, Stream stream) override {
    if (memory.get_deleter() != &DeviceMemory::release || memory.get_context() == nullptr) return;
    auto* block = static_cast<Block*>(memory.get_context());
    std::lock_guard<std::mutex> hold(mutex_);
    if (&queue(stream) != block->home) block->others.insert(&queue(stream));
  }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> hold(mutex_);
    retire();
    for (auto& [key, blocks] : free_) {
      for (auto* block : blocks) {
        block->home->join(block->home->position());
        std::free(block->memory);
        delete block;
      }
      blocks.clear();
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& stat : stats_.at(device).allocated_bytes) stat.reset_peak();
  }

 private:
  struct Block {
    void* memory;
    size_t size;
    Queue* home;
    std::set<Queue*> others;
  };

  static void release(void* context) {
    if (context == nullptr || forked) return;
    auto* block = static_cast<Block*>(context);
    auto& self = instance();
    std::lock_guard<std::mutex> hold(self.mutex_);
    self.count(block->home->stream.device_index(), -static_cast<int64_t>(block->size));
    std::vector<Mark> marks;
    for (auto* other : block->others) marks.push_back({other, other->position()});
    block->others.clear();
    self.freed_.push_back({block, std::move(marks)});
    self.retire();
  }

  // Poisons what no recorded stream uses any more, in the order of its own stream.
  void retire() {
    for (auto it = freed_.begin(); it != freed_.end();) {
      auto& [block, marks] = *it;
      if (!std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.passed(); })) {
        ++it;
        continue;
      }
      block->home->work([memory = block->memory, size = block->size] { std::memset(memory, kPoison, size); });
      free_[{block->home, block->size}].push_back(block);
      it = freed_.erase(it);
    }
  }

  void count(DeviceIndex device, int64_t nbytes) {
    for (auto& stat : stats_.at(device).allocated_bytes) {
      nbytes > 0 ? stat.increase(nbytes) : stat.decrease(-nbytes);
    }
  }

  std::mutex mutex_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free_;
  std::deque<std::pair<Block*, std::vector<Mark>>> freed_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats_;
};

DeviceMemory& DeviceMemory::instance() {
  static auto* made = new DeviceMemory;
  return *made;
}

// Ranges of host memory that copies can read late: what the pinned allocator made, and what was registered.
class PinnedRanges {
 public:
  void add(void* begin, size_t nbytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(begin)] = nbytes;
    total_ += nbytes;
  }
  bool remove(void* begin) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = ranges_.find(reinterpret_cast<uintptr_t>(begin));
    if (found == ranges_.end()) return false;
    total_ -= found->second;
    ranges_.erase(found);
    return true;
  }
  bool holds(const void* address) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto at = reinterpret_cast<uintptr_t>(address);
    auto found = ranges_.upper_bound(at);
    return found != ranges_.begin() && (--found, at < found->first + found->second);
  }
  size_t total() {
    std::lock_guard<std::mutex> hold(mutex_);
    return total_;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
  size_t total_ = 0;
};
PinnedRanges& pinned_ranges() {
  static auto* made = new PinnedRanges;
  return *made;
}

struct HostMemory final : at::CachingHostAllocatorImpl<Stream, Mark> {
 private:
  using Block = at::HostBlock<Stream>;
  void allocate_host_memory(size_t size, void** memory) override {
    TORCH_CHECK(posix_memalign(memory, 4096, size) == 0, "out of host memory");
    pinned_ranges().add(*memory, size);
  }
  void free_block(Block* block) override {
    pinned_ranges().remove(block->ptr_);
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<Mark>>& events, Stream stream) override {
    events->push_back({&queue(stream), queue(stream).position()});
  }
  bool query_event(Mark& mark) override { return mark.passed(); }
};

void release_pinned(void* context);
struct PinnedAllocator final : at::CachingHostAllocatorInterface<HostMemory, release_pinned> {};
PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}
void release_pinned(void* context) {
  pinned_allocator().free(context);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({kType, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const auto before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  bool isPinnedPtr(const void* address) const override { return pinned_ranges().holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(knobs().pinned, "this simulated device has no pinned memory");
    return &pinned_allocator();
  }
  Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::globalContext().defaultGenerator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override;
};

// --- copies ---------------------------------------------------------------------------------------

char* address(const Tensor& tensor) {
  auto* begin = static_cast<char*>(tensor.storage().mutable_data());
  TORCH_CHECK(begin != nullptr || tensor.numel() == 0, "a simulated tensor has no memory");
  return begin + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

// The same memory as a host tensor that owns nothing of it: what a task sees.
Tensor seen_by_tasks(const Tensor& tensor) {
  c10::InferenceMode normal(false);  // the thread of a stream is in no such mode
  auto seen = at::from_blob(
      address(tensor), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU));
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

// A copy between dtypes that there is no kernel for is refused when it is asked for, not when its turn comes.
void check_dtypes(c10::ScalarType to, c10::ScalarType from) {
  if (to != from) at::empty({1}, to).copy_(at::zeros({1}, c10::kByte).expand({16}).clone().view(from).narrow(0, 0, 1));
}

void count_copy() {
  auto fail_after = knobs().fail_after.load();
  TORCH_CHECK(fail_after < 0 || knobs().copies < fail_after, "the simulated device is out of order");
  ++knobs().copies;
}

std::function<void()> failing(std::function<void()> task) {
  return knobs().fail_late ? [] { TORCH_CHECK(false, "a copy was lost"); } : std::move(task);
}

bool plain(const Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void copy_within(const Tensor& to, const Tensor& from) {
  auto& mine = current_queue(from.device().index());
  const bool across = to.device() != from.device();
  auto& theirs = current_queue(to.device().index());
  if (across) wait_on(mine, {&theirs, theirs.position()});
  count_copy();
  if (to.dtype() == from.dtype() && plain(to) && plain(from)) {
    mine.work(failing([a = address(to), b = address(from), n = to.nbytes()] { std::memmove(a, b, n); }));
  } else {
    check_dtypes(to.scalar_type(), from.scalar_type());
    mine.work(failing([a = seen_by_tasks(to), b = seen_by_tasks(from)]() mutable { a.copy_(b); }));
  }
  if (across) wait_on(theirs, {&mine, mine.position()});
}

Tensor copy_from(const Tensor& from_any, const Tensor& to, bool non_blocking) {
  auto from = from_any.expand_as(to);
  if (to.numel() == 0) return to;
  const bool up = from.device().is_cpu(), down = to.device().is_cpu();
  if (!up && !down) {
    copy_within(to, from);
    return to;
  }
  const auto& there = up ? to : from;
  c10::DeviceGuard guard(there.device());
  if (to.dtype() != from.dtype() || !to.is_contiguous() || !from.is_contiguous()) {
    // What is cast or gathered is so on the device if nobody waits, else on the host; the bytes go over in between.
    Tensor to_whole, from_whole;
    if (non_blocking != up) {
      to_whole = to.is_contiguous() ? to : at::empty_like(to, c10::MemoryFormat::Contiguous);
      from_whole = from.to(to.dtype()).contiguous();
    } else {
      const bool fits = to.is_contiguous() && to.dtype() == from.dtype();
      to_whole = fits ? to : at::empty_like(to, from.options().device(to.device()), c10::MemoryFormat::Contiguous);
      from_whole = from.contiguous();
    }
    to_whole._set_conj(to.is_conj());
    to_whole._set_neg(to.is_neg());
    from_whole._set_conj(from.is_conj());
    from_whole._set_neg(from.is_neg());
    to_whole.copy_(from_whole, non_blocking);
    if (!to_whole.is_same(to)) const_cast<Tensor&>(to).copy_(to_whole, non_blocking);
    return to;
  }
  auto& mine = current_queue(there.device().index());
  const auto& host = up ? from : to;
  char *a = address(to), *b = address(from);
  const size_t nbytes = to.nbytes();
  const bool late = pinned_ranges().holds(up ? b : a);
  count_copy();
  if (up && !late) {  // taken along, so the host may change it
    auto bytes = std::make_shared<std::vector<char>>(b, b + nbytes);
    mine.work(failing([a, bytes, nbytes] { std::memcpy(a, bytes->data(), nbytes); }));
  } else {
    mine.work(failing([a, b, nbytes] { std::memcpy(a, b, nbytes); }));
  }
  if (non_blocking && late) {
    pinned_allocator().record_event(up ? b : a, host.storage().data_ptr().get_context(), mine.stream);
  } else if (!non_blocking || down) {
    synchronize(mine);
  }
  // At once, on the side of the destination: on the host that is before a copy that nobody waits for has arrived. So does CUDA.
  if (to.is_conj() != from.is_conj()) const_cast<Tensor&>(to).conj_physical_();
  if (to.is_neg() != from.is_neg()) const_cast<Tensor&>(to).neg_();
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// CUDA's kernel takes these and no others, on either side, wherever it is the kernel that runs (torch 2.8; since 2.11 four of float8 too).
bool foreach_takes(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kByte: case c10::kChar: case c10::kShort: case c10::kInt: case c10::kLong: case c10::kBool:
    case c10::kHalf: case c10::kBFloat16: case c10::kFloat: case c10::kDouble: case c10::kComplexFloat: case c10::kComplexDouble:
      return true;
    default:
      return false;
  }
}

void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  TORCH_CHECK(!to.empty() && to.size() == from.size(), "lists of different lengths");
  bool fast = true;
  for (size_t i = 0; i < to.size(); ++i) {
    fast = fast && to[i].device() == to[0].device() && from[i].device() == to[0].device() &&
        to[i].dtype() == to[0].dtype() && from[i].dtype() == from[0].dtype() && to[i].sizes() == from[i].sizes() &&
        to[i].strides() == from[i].strides() && to[i].is_non_overlapping_and_dense();
  }
  if (!fast) {
    for (size_t i = 0; i < to.size(); ++i) const_cast<Tensor&>(to[i]).copy_(from[i], non_blocking);
    return;
  }
  for (auto dtype : {to[0].scalar_type(), from[0].scalar_type()}) {
    TORCH_CHECK_NOT_IMPLEMENTED(foreach_takes(dtype), "\"foreach_tensor_copy\" not implemented for '", dtype, "'");
  }
  count_copy();
  ++knobs().grouped;
  c10::InferenceMode normal(false);  // as above
  std::vector<Tensor> a, b;
  for (size_t i = 0; i < to.size(); ++i) {
    a.push_back(at::from_blob(address(to[i]), {to[i].numel()}, at::TensorOptions().dtype(to[i].dtype())));
    b.push_back(at::from_blob(address(from[i]), {from[i].numel()}, at::TensorOptions().dtype(from[i].dtype())));
  }
  current_queue(to[0].device().index()).work(failing([a = std::move(a), b = std::move(b)]() mutable {
    for (size_t i = 0; i < a.size(); ++i) a[i].copy_(b[i]);
  }));
}

// --- the few operations that do not wait, and those on sizes ---------------------------------------

Tensor& fill(Tensor& self, const at::Scalar& value) {
  if (self.numel()) current_queue(self.device().index()).work([a = seen_by_tasks(self), value]() mutable { a.fill_(value); });
  return self;
}

Tensor& zero(Tensor& self) {
  return fill(self, 0);
}

Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device> device,
    std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only host memory can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only host memory can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::GetAllocator(kType),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  c10::DeviceGuard guard(storage.device());
  auto memory = c10::GetAllocator(kType)->allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) {
    current_queue(storage.device().index()).work([a = memory.get(), b = storage.mutable_data(), kept] { std::memcpy(a, b, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const {
  resize_storage(storage, nbytes);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}

Tensor& set_source_storage(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

Tensor& set_source_storage_offset(
    Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(Tensor& self, Stream stream) {
  c10::getDeviceAllocator(kType)->recordStream(self.storage().data_ptr(), stream);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  m.impl("fill_.Scalar", TORCH_FN(fill));
  m.impl("zero_", TORCH_FN(zero));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_source_storage_offset));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// Copies do conjugation and negation themselves, as copy_ does.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

const bool installed = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &DeviceMemory::instance());
  at::setHostAllocator(kType, &pinned_allocator());
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

}  // namespace

// --- for Python, by ctypes ------------------------------------------------------------------------

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
};

extern "C" {

int64_t* simulated_knob(const char* name) {
  static const std::map<std::string, std::atomic<int64_t>*> all{
      {"delay", &knobs().delay},           {"pinned", &knobs().pinned},       {"streams", &knobs().streams},
      {"fail_after", &knobs().fail_after}, {"fail_late", &knobs().fail_late}, {"copies", &knobs().copies},
      {"grouped", &knobs().grouped},       {"waits", &knobs().waits},         {"allocated", &knobs().allocated},
      {"contexts", &knobs().contexts},
  };
  auto found = all.find(name);
  return found == all.end() ? nullptr : reinterpret_cast<int64_t*>(found->second);
}

// Holds a stream up until the gate is opened.
void* simulated_gate(int device, int64_t stream) {
  auto* gate = new Gate;  // never freed: who opens it does not know when the stream has come by
  queue(static_cast<DeviceIndex>(device), stream).push([gate] {
    std::unique_lock<std::mutex> hold(gate->mutex);
    gate->changed.wait(hold, [&] { return gate->open; });
  });
  return gate;
}

void simulated_open(void* opened) {
  auto* gate = static_cast<Gate*>(opened);
  std::lock_guard<std::mutex> hold(gate->mutex);
  gate->open = true;
  gate->changed.notify_all();
}

int simulated_register(void* begin, size_t nbytes) {
  knobs().contexts |= int64_t{1} << current_device;
  if (!knobs().pinned || pinned_ranges().holds(begin)) return 1;
  pinned_ranges().add(begin, nbytes);
  return 0;
}

int simulated_unregister(void* begin) {
  knobs().contexts |= int64_t{1} << current_device;
  return pinned_ranges().remove(begin) ? 0 : 1;
}

int simulated_is_pinned(const void* address) {
  return pinned_ranges().holds(address);
}

size_t simulated_pinned_bytes() {
  return pinned_ranges().total();
}

int simulated_devices() {
  return kDevices;
}
}
