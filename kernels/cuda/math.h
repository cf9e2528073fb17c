/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/math.h on a CUDA device. */
#ifndef ZS_KERNELS_CUDA_MATH_H
#define ZS_KERNELS_CUDA_MATH_H

#include "device/device.h"
#include "kernels/math.h"

/* For zs_cuda_plugin's math_open, which see. */
zs_status zs_cuda_math_open(zs_device *device, zs_ledger *ledger, zs_math **out);

#endif
