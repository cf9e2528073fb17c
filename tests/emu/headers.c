/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled against NVIDIA's headers where they are installed, and against those of the emulation:
 * what zspill calls has the same types and values in both. Nothing is run. */
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#define VALUE(name, value)                                                                         \
    _Static_assert((int)(name) == (value), #name " is another number in this header")
/* A pointer to another type of function does not compile. */
#define FUNCTION(result, name, ...) result (*const check_##name)(__VA_ARGS__) = name

VALUE(cudaSuccess, 0);
VALUE(cudaErrorInvalidValue, 1);
VALUE(cudaErrorMemoryAllocation, 2);
VALUE(cudaErrorInvalidConfiguration, 9);
VALUE(cudaErrorInsufficientDriver, 35);
VALUE(cudaErrorNoDevice, 100);
VALUE(cudaErrorInvalidDevice, 101);
VALUE(cudaErrorInvalidResourceHandle, 400);
VALUE(cudaErrorNotReady, 600);
VALUE(cudaErrorIllegalAddress, 700);
VALUE(cudaErrorLaunchOutOfResources, 701);
VALUE(cudaErrorHostMemoryAlreadyRegistered, 712);
VALUE(cudaErrorHostMemoryNotRegistered, 713);
VALUE(cudaErrorLaunchFailure, 719);
VALUE(cudaMemcpyHostToHost, 0);
VALUE(cudaMemcpyHostToDevice, 1);
VALUE(cudaMemcpyDeviceToHost, 2);
VALUE(cudaMemcpyDeviceToDevice, 3);
VALUE(cudaMemcpyDefault, 4);
VALUE(cudaStreamNonBlocking, 1);
VALUE(cudaEventDisableTiming, 2);
VALUE(cudaHostRegisterPortable, 1);
VALUE(cudaHostRegisterMapped, 2);
VALUE(cudaFuncAttributeMaxDynamicSharedMemorySize, 8);
VALUE(cudaDevAttrMultiProcessorCount, 16);
VALUE(cudaDevAttrComputeCapabilityMajor, 75);
VALUE(cudaDevAttrComputeCapabilityMinor, 76);
VALUE(cudaDevAttrMaxSharedMemoryPerBlockOptin, 97);
VALUE(cudaMemoryTypeUnregistered, 0);
VALUE(cudaMemoryTypeHost, 1);
VALUE(cudaMemoryTypeDevice, 2);

FUNCTION(cudaError_t, cudaGetDeviceCount, int *);
FUNCTION(cudaError_t, cudaGetDeviceProperties, struct cudaDeviceProp *, int);
FUNCTION(cudaError_t, cudaDeviceGetAttribute, int *, enum cudaDeviceAttr, int);
FUNCTION(cudaError_t, cudaDeviceGetStreamPriorityRange, int *, int *);
FUNCTION(cudaError_t, cudaDeviceSynchronize, void);
FUNCTION(cudaError_t, cudaSetDevice, int);
FUNCTION(cudaError_t, cudaGetDevice, int *);
FUNCTION(cudaError_t, cudaMemGetInfo, size_t *, size_t *);
FUNCTION(cudaError_t, cudaGetLastError, void);
FUNCTION(cudaError_t, cudaPeekAtLastError, void);
FUNCTION(const char *, cudaGetErrorName, cudaError_t);
FUNCTION(const char *, cudaGetErrorString, cudaError_t);
FUNCTION(cudaError_t, cudaMalloc, void **, size_t);
FUNCTION(cudaError_t, cudaFree, void *);
FUNCTION(cudaError_t, cudaHostRegister, void *, size_t, unsigned int);
FUNCTION(cudaError_t, cudaHostUnregister, void *);
FUNCTION(cudaError_t, cudaHostGetDevicePointer, void **, void *, unsigned int);
FUNCTION(cudaError_t, cudaPointerGetAttributes, struct cudaPointerAttributes *, const void *);
FUNCTION(cudaError_t, cudaStreamCreateWithFlags, cudaStream_t *, unsigned int);
FUNCTION(cudaError_t, cudaStreamCreateWithPriority, cudaStream_t *, unsigned int, int);
FUNCTION(cudaError_t, cudaStreamDestroy, cudaStream_t);
FUNCTION(cudaError_t, cudaStreamSynchronize, cudaStream_t);
FUNCTION(cudaError_t, cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned int);
FUNCTION(cudaError_t, cudaEventCreateWithFlags, cudaEvent_t *, unsigned int);
FUNCTION(cudaError_t, cudaEventDestroy, cudaEvent_t);
FUNCTION(cudaError_t, cudaEventRecord, cudaEvent_t, cudaStream_t);
FUNCTION(cudaError_t, cudaEventSynchronize, cudaEvent_t);
FUNCTION(cudaError_t, cudaEventQuery, cudaEvent_t);
FUNCTION(cudaError_t, cudaMemcpyAsync, void *, const void *, size_t, enum cudaMemcpyKind,
         cudaStream_t);
FUNCTION(cudaError_t, cudaMemsetAsync, void *, int, size_t, cudaStream_t);
FUNCTION(cudaError_t, cudaFuncSetAttribute, const void *, enum cudaFuncAttribute, int);
FUNCTION(cudaError_t, cudaFuncGetAttributes, struct cudaFuncAttributes *, const void *);

VALUE(ncclSuccess, 0);
VALUE(ncclUnhandledCudaError, 1);
VALUE(ncclSystemError, 2);
VALUE(ncclInternalError, 3);
VALUE(ncclInvalidArgument, 4);
VALUE(ncclInvalidUsage, 5);
VALUE(ncclRemoteError, 6);
VALUE(ncclInProgress, 7);
VALUE(ncclInt8, 0);
VALUE(ncclUint8, 1);
VALUE(ncclInt32, 2);
VALUE(ncclUint32, 3);
VALUE(ncclInt64, 4);
VALUE(ncclUint64, 5);
VALUE(ncclFloat16, 6);
VALUE(ncclFloat32, 7);
VALUE(ncclFloat64, 8);
VALUE(ncclBfloat16, 9);
VALUE(ncclSum, 0);
VALUE(ncclProd, 1);
VALUE(ncclMax, 2);
VALUE(ncclMin, 3);
VALUE(ncclAvg, 4);
VALUE(sizeof(ncclUniqueId), 128);

FUNCTION(ncclResult_t, ncclGetVersion, int *);
FUNCTION(ncclResult_t, ncclGetUniqueId, ncclUniqueId *);
FUNCTION(ncclResult_t, ncclCommInitAll, ncclComm_t *, int, const int *);
FUNCTION(ncclResult_t, ncclCommInitRank, ncclComm_t *, int, ncclUniqueId, int);
FUNCTION(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *, int, ncclUniqueId, int,
         ncclConfig_t *);
FUNCTION(ncclResult_t, ncclCommFinalize, ncclComm_t);
FUNCTION(ncclResult_t, ncclCommDestroy, ncclComm_t);
FUNCTION(ncclResult_t, ncclCommAbort, ncclComm_t);
FUNCTION(ncclResult_t, ncclCommGetAsyncError, ncclComm_t, ncclResult_t *);
FUNCTION(ncclResult_t, ncclCommCount, const ncclComm_t, int *);
FUNCTION(ncclResult_t, ncclCommUserRank, const ncclComm_t, int *);
FUNCTION(const char *, ncclGetErrorString, ncclResult_t);
FUNCTION(const char *, ncclGetLastError, ncclComm_t);
FUNCTION(ncclResult_t, ncclReduceScatter, const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
         ncclComm_t, cudaStream_t);
FUNCTION(ncclResult_t, ncclAllGather, const void *, void *, size_t, ncclDataType_t, ncclComm_t,
         cudaStream_t);
FUNCTION(ncclResult_t, ncclAllReduce, const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
         ncclComm_t, cudaStream_t);
FUNCTION(ncclResult_t, ncclBroadcast, const void *, void *, size_t, ncclDataType_t, int, ncclComm_t,
         cudaStream_t);
FUNCTION(ncclResult_t, ncclSend, const void *, size_t, ncclDataType_t, int, ncclComm_t,
         cudaStream_t);
FUNCTION(ncclResult_t, ncclRecv, void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
FUNCTION(ncclResult_t, ncclGroupStart, void);
FUNCTION(ncclResult_t, ncclGroupEnd, void);

VALUE(CUBLAS_STATUS_SUCCESS, 0);
VALUE(CUBLAS_STATUS_NOT_INITIALIZED, 1);
VALUE(CUBLAS_STATUS_ALLOC_FAILED, 3);
VALUE(CUBLAS_STATUS_INVALID_VALUE, 7);
VALUE(CUBLAS_STATUS_ARCH_MISMATCH, 8);
VALUE(CUBLAS_STATUS_MAPPING_ERROR, 11);
VALUE(CUBLAS_STATUS_EXECUTION_FAILED, 13);
VALUE(CUBLAS_STATUS_INTERNAL_ERROR, 14);
VALUE(CUBLAS_STATUS_NOT_SUPPORTED, 15);
VALUE(CUBLAS_OP_N, 0);
VALUE(CUBLAS_OP_T, 1);
VALUE(CUBLAS_OP_C, 2);
VALUE(CUBLAS_POINTER_MODE_HOST, 0);
VALUE(CUBLAS_POINTER_MODE_DEVICE, 1);
VALUE(CUBLAS_DEFAULT_MATH, 0);
VALUE(CUBLAS_PEDANTIC_MATH, 2);
VALUE(CUBLAS_TF32_TENSOR_OP_MATH, 3);
VALUE(CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, 16);
VALUE(CUBLAS_GEMM_DEFAULT, -1);
VALUE(CUDA_R_32F, 0);
VALUE(CUDA_R_16F, 2);
VALUE(CUDA_R_16BF, 14);
VALUE(CUBLAS_COMPUTE_32F, 68);
VALUE(CUBLAS_COMPUTE_32F_PEDANTIC, 69);
VALUE(CUBLAS_COMPUTE_32F_FAST_TF32, 77);

FUNCTION(cublasStatus_t, cublasCreate, cublasHandle_t *);
FUNCTION(cublasStatus_t, cublasDestroy, cublasHandle_t);
FUNCTION(cublasStatus_t, cublasSetStream, cublasHandle_t, cudaStream_t);
FUNCTION(cublasStatus_t, cublasSetWorkspace, cublasHandle_t, void *, size_t);
FUNCTION(cublasStatus_t, cublasSetMathMode, cublasHandle_t, cublasMath_t);
FUNCTION(cublasStatus_t, cublasSetPointerMode, cublasHandle_t, cublasPointerMode_t);
FUNCTION(const char *, cublasGetStatusName, cublasStatus_t);
FUNCTION(const char *, cublasGetStatusString, cublasStatus_t);
FUNCTION(cublasStatus_t, cublasGemmEx, cublasHandle_t, cublasOperation_t, cublasOperation_t, int,
         int, int, const void *, const void *, cudaDataType, int, const void *, cudaDataType, int,
         const void *, void *, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
FUNCTION(cublasStatus_t, cublasGemmStridedBatchedEx, cublasHandle_t, cublasOperation_t,
         cublasOperation_t, int, int, int, const void *, const void *, cudaDataType, int,
         long long int, const void *, cudaDataType, int, long long int, const void *, void *,
         cudaDataType, int, long long int, int, cublasComputeType_t, cublasGemmAlgo_t);
FUNCTION(cublasStatus_t, cublasGemmBatchedEx, cublasHandle_t, cublasOperation_t, cublasOperation_t,
         int, int, int, const void *, const void *const *, cudaDataType, int, const void *const *,
         cudaDataType, int, const void *, void *const *, cudaDataType, int, int,
         cublasComputeType_t, cublasGemmAlgo_t);
