// A device guard and hooks for CUDA that do nothing, and attention by the kernel whose number the environment
// gives: with them a PyTorch without CUDA runs fake CUDA tensors forward and backward.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kind = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(kind, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

int64_t chosen(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
               bool, std::optional<double>, bool) {
  return std::atoi(std::getenv("ATTENTION_KERNEL"));
}
struct Choice {
  Choice() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&chosen); }
} choice;
}  // namespace

namespace at {
using CUDAHooks = ::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
