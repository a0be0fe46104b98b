// SPDX-License-Identifier: Apache-2.0
// A CUDA driver that knows no device: vLLM's CUDA build is linked with the driver's
// library and can be loaded with this one in its place (packaging/cuda_wheel.sh).
// Every function answers CUDA_ERROR_NO_DEVICE.
#define STUB(name) \
    int name(void) { return 100; }

STUB(cuCtxGetCurrent)
STUB(cuCtxSetCurrent)
STUB(cuDeviceGetAttribute)
STUB(cuDevicePrimaryCtxRetain)
STUB(cuGetErrorString)
STUB(cuGetProcAddress)
STUB(cuGetProcAddress_v2)
STUB(cuInit)
STUB(cuMemAddressFree)
STUB(cuMemAddressReserve)
STUB(cuMemCreate)
STUB(cuMemGetAllocationGranularity)
STUB(cuMemMap)
STUB(cuMemRelease)
STUB(cuMemSetAccess)
STUB(cuMemUnmap)
STUB(cuPointerGetAttribute)
STUB(cuTensorMapEncodeTiled)
