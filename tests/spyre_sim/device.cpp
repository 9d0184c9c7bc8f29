// The C++ half of the simulated Spyre device: a PrivateUse1 backend whose memory is host memory.
//
// device.py, which builds and drives this, says what is simulated and what is not.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

const at::Device kSpyre(at::kPrivateUse1, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- What is counted. Tests use one thread, and the GIL is held wherever these change. ----

struct Transfer {
  std::string direction;  // "h2d" or "d2h"
  std::vector<int64_t> shape;
  std::string dtype;
  int64_t bytes;
};

struct State {
  std::vector<Transfer> transfers;
  std::map<std::string, int64_t> eager_fallbacks;
  std::map<std::string, int64_t> compiled_fallbacks;
  int64_t fallback_bytes = 0;
  int64_t device_copies = 0;
  int64_t device_copy_bytes = 0;
  int64_t live_bytes = 0;
  std::set<std::string> forbidden;
  bool forbid_bool = false;
  bool refuse_slices = true;
};

State& state() {
  static State* instance = new State();  // leaked: tensors may die after static destruction
  return *instance;
}

thread_local int region_depth = 0;    // inside the code of a compiled graph
thread_local int fallback_depth = 0;  // inside a CPU fallback, whose copies are its own affair
thread_local int whole_depth = 0;     // inside an operation that is one to the card, and several to PyTorch

struct Depth {
  explicit Depth(int& value) : value(value) { ++value; }
  ~Depth() { --value; }
  int& value;
};

// ---- Memory ----

// A layout belongs to the memory: views share it, and it ends with it. Number 0 stands for the default one, which
// follows from the sizes and strides that the memory was first used with.
struct Block {
  void* data;
  size_t bytes;
  int64_t layout = 0;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  state().live_bytes -= static_cast<int64_t>(block->bytes);
  c10::free_cpu(block->data);
  delete block;
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_nothing, kSpyre};
    }
    auto* block = new Block{c10::alloc_cpu(bytes), bytes};
    std::memset(block->data, 0xFF, bytes);  // NaN in every floating-point format
    state().live_bytes += static_cast<int64_t>(bytes);
    return {block->data, block, &free_block, kSpyre};
  }
  static void free_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &allocator);

// Null for a tensor without memory.
Block* block_of(const at::Tensor& t) {
  const auto& data = t.storage().data_ptr();
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

at::Tensor prepared(at::Tensor fresh) {
  if (auto* block = block_of(fresh)) {
    block->sizes = fresh.sizes().vec();
    block->strides = fresh.strides().vec();
  }
  if (fresh.scalar_type() == at::kBool && fresh.nbytes() > 0) {
    std::memset(fresh.data_ptr(), 0, fresh.nbytes());  // a bool of 0xFF is no bool at all
  }
  return fresh;
}

// ---- One device, no streams ----

struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::kPrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return kSpyre; }
  c10::Device getDevice() const override { return kSpyre; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kSpyre); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kSpyre); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kSpyre);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kSpyre; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr fresh = allocator.allocate(bytes);
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- Native kernels ----

// A CPU tensor over the memory of a device tensor.
at::Tensor host_view(const at::Tensor& t) {
  auto options = t.options().device(at::kCPU);
  return at::for_blob(t.data_ptr(), t.sizes())
      .strides(t.strides())
      .deleter([keep = t.storage()](void*) {})
      .options(options)
      .make_tensor();
}

at::Tensor on_host(const at::Tensor& t) {
  return t.is_privateuseone() ? host_view(t) : t;
}

void count_copy(const at::Tensor& src, const at::Tensor& dst) {
  auto& s = state();
  auto bytes = static_cast<int64_t>(dst.nbytes());
  bool from = src.is_privateuseone(), to = dst.is_privateuseone();
  if (from && to) {
    s.device_copies += 1;
    s.device_copy_bytes += bytes;
  } else if (fallback_depth > 0) {
    s.fallback_bytes += bytes;
  } else {
    s.transfers.push_back({to ? "h2d" : "d2h", dst.sizes().vec(), c10::toString(dst.scalar_type()), bytes});
  }
}

bool is_whole(const at::Tensor& t) {
  return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() && t.nbytes() >= t.storage().nbytes();
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool) {
  bool upload = !src.is_privateuseone() && dst.is_privateuseone();
  TORCH_CHECK(
      !upload || fallback_depth > 0 || !state().refuse_slices || is_whole(dst),
      "spyre: copying from the host into a slice of a device tensor (shape ", dst.sizes(), ", strides ", dst.strides(),
      ", offset ", dst.storage_offset(), ") writes to the wrong place: move whole tensors");
  count_copy(src, dst);
  on_host(dst).copy_(on_host(src));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) {
    dst.resize_(src.sizes());
  }
  return copy_from(src, dst, false);
}

at::Scalar local_scalar(const at::Tensor& t) {
  auto host = at::empty(t.sizes(), t.options().device(at::kCPU));
  copy_from(t, host, false);
  return host.item();
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  auto type = c10::dtype_or_default(dtype);
  return prepared(at::detail::empty_generic(size, &allocator, kKeys, type, format));
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto type = c10::dtype_or_default(dtype);
  return prepared(at::detail::empty_strided_generic(size, stride, &allocator, kKeys, type));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto strides = c10::contiguous_strides(size);
  auto bytes = at::detail::computeStorageNbytes(size, strides, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  auto dense = c10::contiguous_strides(size);
  impl->set_sizes_and_strides(size, stride.empty() ? at::IntArrayRef(dense) : stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

// ---- Everything else: on the CPU, counted by name ----

// "aten::index_copy_" and "aten::index_copy" are the same to a test; overloads do not matter either.
std::string plain_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  auto colons = name.rfind(':');
  name = colons == std::string::npos ? name : name.substr(colons + 1);
  while (name.size() > 1 && name.back() == '_') {
    name.pop_back();
  }
  return name;
}

bool is_bool_tensor(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() && value.toTensor().scalar_type() == at::kBool;
  }
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList()) {
      if (t.defined() && t.scalar_type() == at::kBool) {
        return true;
      }
    }
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
      if (t.has_value() && t->defined() && t->scalar_type() == at::kBool) {
        return true;
      }
    }
  }
  return false;
}

void refuse_forbidden(const c10::OperatorHandle& op, const std::string& name, const torch::jit::Stack& stack) {
  const auto& s = state();
  TORCH_CHECK(s.forbidden.count(name) == 0, "spyre: eager '", name, "' is forbidden here");
  if (s.forbid_bool) {
    auto count = op.schema().arguments().size();
    for (const auto& value : torch::jit::last(stack, count)) {
      TORCH_CHECK(!is_bool_tensor(value), "spyre: eager '", name, "' with a bool tensor is forbidden here");
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = plain_name(op);
  bool compiled = region_depth > 0;
  if (fallback_depth == 0) {
    if (!compiled) {
      refuse_forbidden(op, name, *stack);
    }
    auto& counts = compiled ? state().compiled_fallbacks : state().eager_fallbacks;
    counts[name] += 1;
  }
  Depth depth(fallback_depth);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// ---- Operations that the card runs as one, and PyTorch as several ----

// Called with the name and the tensors before such an operation begins. Leaked, as the state is.
pybind11::object& whole_hook() {
  static auto* hook = new pybind11::object(pybind11::none());
  return *hook;
}

std::atomic<bool> hooked{false};

void whole(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (hooked && region_depth == 0 && whole_depth == 0) {
    std::vector<at::Tensor> tensors;
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor() && value.toTensor().defined()) {
        tensors.push_back(value.toTensor());
      }
    }
    pybind11::gil_scoped_acquire gil;
    whole_hook()(plain_name(op), tensors);
  }
  Depth depth(whole_depth);
  op.redispatchBoxed(kKeys, stack);  // to PyTorch's own composition
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  // As one operation each. Else the first falls apart into a dozen, with bool masks among them; the other has no kernel.
  m.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&whole>());
  m.impl("linear", torch::CppFunction::makeFromBoxedFunction<&whole>());
  m.impl("rms_norm", torch::CppFunction::makeFromBoxedFunction<&whole>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());

  m.def("host_view", [](const at::Tensor& t) {
    TORCH_CHECK(t.is_privateuseone(), "expected a spyre tensor, got one on ", t.device());
    return host_view(t);
  });
  m.def("enter_region", [] { ++region_depth; });
  m.def("exit_region", [] { --region_depth; });
  m.def("in_region", [] { return region_depth > 0; });
  m.def("in_whole", [] { return whole_depth > 0; });
  m.def("hook_whole", [](pybind11::object hook) {
    hooked = !hook.is_none();
    whole_hook() = std::move(hook);
  });
  m.def("is_whole", &is_whole);
  m.def("set_layout", [](const at::Tensor& t, int64_t number) {
    if (auto* block = block_of(t)) {
      block->layout = number;
    }
  });
  // The layout's number, and the sizes and strides that the memory was first used with.
  m.def("allocation", [](const at::Tensor& t) {
    TORCH_CHECK(t.is_privateuseone(), "expected a spyre tensor, got one on ", t.device());
    const auto* block = block_of(t);
    bool known = block != nullptr && !(block->sizes.empty() && t.dim() > 0);
    return std::make_tuple(
        block == nullptr ? 0 : block->layout,
        known ? block->sizes : t.sizes().vec(),
        known ? block->strides : t.strides().vec());
  });
  m.def("forbid", [](std::set<std::string> names, bool bool_tensors) {
    state().forbidden = std::move(names);
    state().forbid_bool = bool_tensors;
  });
  m.def("forbidden", [] { return std::make_pair(state().forbidden, state().forbid_bool); });
  m.def("refuse_slices", [](bool refuse) { return std::exchange(state().refuse_slices, refuse); });
  m.def("live_bytes", [] { return state().live_bytes; });
  // Everything since the process began, but of the transfers only those from the given one on.
  m.def("counters", [](size_t first_transfer) {
    const auto& s = state();
    pybind11::list transfers;
    for (size_t i = first_transfer; i < s.transfers.size(); ++i) {
      const auto& t = s.transfers[i];
      transfers.append(pybind11::make_tuple(t.direction, pybind11::tuple(pybind11::cast(t.shape)), t.dtype, t.bytes));
    }
    pybind11::dict d;
    d["transfers"] = transfers;
    d["eager_fallbacks"] = s.eager_fallbacks;
    d["compiled_fallbacks"] = s.compiled_fallbacks;
    d["fallback_bytes"] = s.fallback_bytes;
    d["device_copies"] = s.device_copies;
    d["device_copy_bytes"] = s.device_copy_bytes;
    return d;
  });
  m.def("transfer_count", [] { return state().transfers.size(); });
}
