/* SPDX-License-Identifier: Apache-2.0 */
#define ZS_NN_TABLE zs_nn_avx2
#define ZS_NN_NAME  "avx2"
#include "kernels/nn_impl.h"
