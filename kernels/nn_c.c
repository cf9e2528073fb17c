/* SPDX-License-Identifier: Apache-2.0 */
#define ZS_NN_TABLE zs_nn_c
#define ZS_NN_NAME  "c"
#include "kernels/nn_impl.h"
