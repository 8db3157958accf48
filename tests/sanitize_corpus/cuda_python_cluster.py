"""race: The blocks of a cluster write memory that another stream reads at the same time.

fixed: The blocks of a cluster write one half of an array; another stream reads the other half.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void fill(int *numbers)
{
    unsigned int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    numbers[blockIdx.x * blockDim.x + threadIdx.x] = rank;
}
extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }
"""
open_device()
first, second = stream(), stream()
module = compiled(SOURCE)
cluster = driver.CUlaunchAttribute()
cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 2, 1, 1
numbers, copied = zeros(4 * 2048), zeros(4 * 1024)

launch(function(module, "fill"), first, 8, 128, numbers, attributes=[cluster])
# WRONG if race: the last element that is read is in the half that is written.
launch(function(module, "copy"), second, 1, 1024, numbers + 4 * (1023 if race else 1024), copied)
call(driver.cuCtxSynchronize())
