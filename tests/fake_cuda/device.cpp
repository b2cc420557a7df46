// CUDA devices that do nothing, for a PyTorch that was built without CUDA: a device guard and hooks, with which
// fake tensors on "cuda" run forward and backward, and a choice of attention kernel.
//
//   FAKE_CUDA_DEVICES    how many there are (default 1)
//   FAKE_CUDA_ATTENTION  the number of PyTorch's SDPBackend that attention takes: 0 math, 1 flash, 2 memory-
//                        efficient, 3 cuDNN. By default as on an A100: flash for half types without a mask, else
//                        the memory-efficient one, math where heads are grouped and it is not flash.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <optional>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex current = 0;

DeviceIndex devices() {
  const char* count = std::getenv("FAKE_CUDA_DEVICES");
  return static_cast<DeviceIndex>(count ? std::atoi(count) : 1);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kind = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return kind; }
  Device getDevice() const override { return Device(kind, current); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return devices(); }

  // There is one stream per device, on which everything has happened already.
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices(); }
  int getNumGPUs() const override { return devices(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
};

enum Kernel : int64_t { math = 0, flash = 1, efficient = 2 };

int64_t attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                  const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool grouped) {
  if (const char* number = std::getenv("FAKE_CUDA_ATTENTION")) return std::atoi(number);
  const auto dtype = query.scalar_type();
  if ((dtype == at::kHalf || dtype == at::kBFloat16) && !mask.has_value()) return flash;
  return grouped ? math : efficient;
}

const bool registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
  return true;
}();

}  // namespace

namespace at {
using CUDAHooks = ::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
