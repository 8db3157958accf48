"""The device attributes of the CUDA driver: number, name, unit and meaning.

From CUdevice_attribute of the CUDA Driver API 13.5 (cuda.h). Names are CUDA's, in lower case, with
units. ``pci_bus_id`` is the full PCI address. Unsupported attributes become Unavailable fields.
"""

from __future__ import annotations

from dataclasses import dataclass

# The columns of the table: number, name, unit ("-" for a plain number) and meaning of an attribute.
_TABLE = """
1 max_threads_per_block - Maximum threads per block
2 max_block_dim_x - Maximum threads per block along x
3 max_block_dim_y - Maximum threads per block along y
4 max_block_dim_z - Maximum threads per block along z
5 max_grid_dim_x - Maximum blocks per grid along x
6 max_grid_dim_y - Maximum blocks per grid along y
7 max_grid_dim_z - Maximum blocks per grid along z
8 max_shared_memory_per_block_bytes bytes Maximum shared memory per block without opting in
9 total_constant_memory_bytes bytes Constant memory for __constant__ variables
10 warp_size - Threads of a warp
11 max_pitch_bytes bytes Maximum pitch of a pitched copy
12 max_registers_per_block - Maximum 32-bit registers per block
13 clock_rate_khz kHz Maximum clock of the SMs
14 texture_alignment_bytes bytes Alignment of texture base addresses
15 gpu_overlap bool Whether copies overlap kernels (deprecated: see async_engine_count)
16 multiprocessor_count - Multiprocessors (SMs)
17 kernel_exec_timeout bool Whether kernels have a time limit (a display is attached)
18 integrated bool Whether the GPU shares the memory of the host
19 can_map_host_memory bool Whether host memory can be mapped
20 compute_mode word Which processes may create contexts
21 maximum_texture1d_width - Maximum width of a 1D texture
22 maximum_texture2d_width - Maximum width of a 2D texture
23 maximum_texture2d_height - Maximum height of a 2D texture
24 maximum_texture3d_width - Maximum width of a 3D texture
25 maximum_texture3d_height - Maximum height of a 3D texture
26 maximum_texture3d_depth - Maximum depth of a 3D texture
27 maximum_texture2d_layered_width - Maximum width of a layered 2D texture
28 maximum_texture2d_layered_height - Maximum height of a layered 2D texture
29 maximum_texture2d_layered_layers - Maximum layers per layered 2D texture
30 surface_alignment_bytes bytes Alignment of surface base addresses
31 concurrent_kernels bool Whether kernels of one context can run concurrently
32 ecc_enabled bool Whether ECC is on
33 pci_bus_number - PCI bus number
34 pci_device_number - PCI device number (slot)
35 tcc_driver bool Whether the driver model is TCC (Windows)
36 memory_clock_rate_khz kHz Maximum clock of the memory
37 global_memory_bus_width_bits bits Width of the memory bus
38 l2_cache_size_bytes bytes L2 cache
39 max_threads_per_multiprocessor - Maximum resident threads per SM
40 async_engine_count - Engines that copy while kernels run
41 unified_addressing bool Whether device and host share one address space
42 maximum_texture1d_layered_width - Maximum width of a layered 1D texture
43 maximum_texture1d_layered_layers - Maximum layers per layered 1D texture
44 can_tex2d_gather bool Deprecated: whether 2D texture gather works
45 maximum_texture2d_gather_width - Maximum width of a gather 2D texture
46 maximum_texture2d_gather_height - Maximum height of a gather 2D texture
47 maximum_texture3d_width_alternate - Maximum width of a 3D texture in the alternate form
48 maximum_texture3d_height_alternate - Maximum height of a 3D texture in the alternate form
49 maximum_texture3d_depth_alternate - Maximum depth of a 3D texture in the alternate form
50 pci_domain_number - PCI domain number
51 texture_pitch_alignment_bytes bytes Alignment of the pitch of pitched textures
52 maximum_texturecubemap_width - Maximum width of a cubemap texture
53 maximum_texturecubemap_layered_width - Maximum width of a layered cubemap texture
54 maximum_texturecubemap_layered_layers - Maximum layers per layered cubemap texture
55 maximum_surface1d_width - Maximum width of a 1D surface
56 maximum_surface2d_width - Maximum width of a 2D surface
57 maximum_surface2d_height - Maximum height of a 2D surface
58 maximum_surface3d_width - Maximum width of a 3D surface
59 maximum_surface3d_height - Maximum height of a 3D surface
60 maximum_surface3d_depth - Maximum depth of a 3D surface
61 maximum_surface1d_layered_width - Maximum width of a layered 1D surface
62 maximum_surface1d_layered_layers - Maximum layers per layered 1D surface
63 maximum_surface2d_layered_width - Maximum width of a layered 2D surface
64 maximum_surface2d_layered_height - Maximum height of a layered 2D surface
65 maximum_surface2d_layered_layers - Maximum layers per layered 2D surface
66 maximum_surfacecubemap_width - Maximum width of a cubemap surface
67 maximum_surfacecubemap_layered_width - Maximum width of a layered cubemap surface
68 maximum_surfacecubemap_layered_layers - Maximum layers per layered cubemap surface
69 maximum_texture1d_linear_width - Maximum width of a linear 1D texture
70 maximum_texture2d_linear_width - Maximum width of a linear 2D texture
71 maximum_texture2d_linear_height - Maximum height of a linear 2D texture
72 maximum_texture2d_linear_pitch_bytes bytes Maximum pitch of a linear 2D texture
73 maximum_texture2d_mipmapped_width - Maximum width of a mipmapped 2D texture
74 maximum_texture2d_mipmapped_height - Maximum height of a mipmapped 2D texture
75 compute_capability_major - Compute capability, major number
76 compute_capability_minor - Compute capability, minor number
77 maximum_texture1d_mipmapped_width - Maximum width of a mipmapped 1D texture
78 stream_priorities_supported bool Whether streams have priorities
79 global_l1_cache_supported bool Whether global loads can be cached in L1
80 local_l1_cache_supported bool Whether local loads can be cached in L1
81 max_shared_memory_per_multiprocessor_bytes bytes Shared memory of an SM
82 max_registers_per_multiprocessor - Maximum 32-bit registers of an SM
83 managed_memory bool Whether managed memory works
84 multi_gpu_board bool Whether the board carries several GPUs
85 multi_gpu_board_group_id - Board number, equal for GPUs on one board
86 host_native_atomic_supported bool Whether atomics on host memory are native
87 single_to_double_precision_perf_ratio - Single-precision operations for each double-precision one
88 pageable_memory_access bool Whether the GPU can access pageable host memory
89 concurrent_managed_access bool Whether host and GPU may access managed memory concurrently
90 compute_preemption_supported bool Whether kernels can be preempted
91 can_use_host_pointer_for_registered_mem bool Whether registered host memory keeps its address on the GPU
92 can_use_stream_mem_ops_v1 bool Deprecated: stream memory operations of version 1
93 can_use_64_bit_stream_mem_ops_v1 bool Deprecated: 64-bit stream memory operations of version 1
94 can_use_stream_wait_value_nor_v1 bool Deprecated: NOR waits of version 1
95 cooperative_launch bool Whether cooperative launches work
96 cooperative_multi_device_launch bool Deprecated: cooperative launches over several GPUs
97 max_shared_memory_per_block_optin_bytes bytes Maximum shared memory per block that opts in
98 can_flush_remote_writes bool Whether remote writes can be flushed
99 host_register_supported bool Whether host memory can be registered
100 pageable_memory_access_uses_host_page_tables bool Whether pageable access uses the host's page tables
101 direct_managed_mem_access_from_host bool Whether the host reads managed memory on the GPU directly
102 virtual_address_management_supported bool Whether virtual memory management works
103 handle_type_posix_file_descriptor_supported bool Whether memory can be shared as POSIX file descriptors
104 handle_type_win32_handle_supported bool Whether memory can be shared as Win32 handles
105 handle_type_win32_kmt_handle_supported bool Whether memory can be shared as Win32 KMT handles
106 max_blocks_per_multiprocessor - Maximum resident blocks per SM
107 generic_compression_supported bool Whether compressible memory works
108 max_persisting_l2_cache_size_bytes bytes Maximum L2 cache set aside for persisting accesses
109 max_access_policy_window_size_bytes bytes Maximum window of an access policy
110 gpu_direct_rdma_with_cuda_vmm_supported bool Whether GPUDirect RDMA works with virtual memory
111 reserved_shared_memory_per_block_bytes bytes Shared memory that the driver keeps in each block
112 sparse_cuda_array_supported bool Whether sparse arrays work
113 read_only_host_register_supported bool Whether host memory can be registered read-only
114 timeline_semaphore_interop_supported bool Whether timeline semaphores of other APIs work
115 memory_pools_supported bool Whether stream-ordered allocation works
116 gpu_direct_rdma_supported bool Whether GPUDirect RDMA works
117 gpu_direct_rdma_flush_writes_options mask Supported ways to flush GPUDirect RDMA writes
118 gpu_direct_rdma_writes_ordering - Scope of RDMA writes without a flush: 0 none, 100 GPU, 200 all
119 mempool_supported_handle_types mask Supported handle types for sharing memory pools
120 cluster_launch bool Whether clusters can be launched
121 deferred_mapping_cuda_array_supported bool Whether arrays can be mapped late
122 can_use_64_bit_stream_mem_ops bool Whether 64-bit stream memory operations work
123 can_use_stream_wait_value_nor bool Whether NOR waits work
124 dma_buf_supported bool Whether memory can be shared as a dma-buf
125 ipc_event_supported bool Whether events can be shared between processes
126 mem_sync_domain_count - Memory synchronization domains
127 tensor_map_access_supported bool Whether tensor maps work (TMA)
128 handle_type_fabric_supported bool Whether memory can be shared by fabric handles
129 unified_function_pointers bool Whether function pointers are unified
130 numa_config word NUMA configuration of the memory
131 numa_id - NUMA node of the GPU's memory
132 multicast_supported bool Whether multicast objects work (NVLink SHARP)
133 mps_enabled bool Whether a context would run under MPS
134 host_numa_id - NUMA node of the host nearest to the GPU
135 d3d12_cig_supported bool Whether CUDA in graphics works with D3D12
136 mem_decompress_algorithm_mask mask Algorithms of the decompression engine
137 mem_decompress_maximum_length_bytes bytes Maximum input of the decompression engine
138 vulkan_cig_supported bool Whether CUDA in graphics works with Vulkan
139 gpu_pci_device_id hex PCI device and vendor id, as reported by CUDA
140 gpu_pci_subsystem_id hex PCI subsystem id, as reported by CUDA
141 host_numa_virtual_memory_management_supported bool Whether virtual memory works on host NUMA nodes
142 host_numa_memory_pools_supported bool Whether memory pools work on host NUMA nodes
143 host_numa_multinode_ipc_supported bool Whether host NUMA memory can be shared between machines
144 host_memory_pools_supported bool Whether memory pools work on the host
145 host_virtual_memory_management_supported bool Whether virtual memory management works on the host
146 host_alloc_dma_buf_supported bool Whether host memory can be shared as a dma-buf
147 only_partial_host_native_atomic_supported bool Whether only some atomics on host memory are native
148 atomic_reduction_supported bool Whether atomic reductions work
149 locality_domain_count - Locality domains of the GPU
150 max_oversized_shared_memory_per_block_bytes bytes Maximum oversized shared memory per block
151 d3d12_cig_streams_supported bool Whether CUDA in graphics with D3D12 takes streams
152 dma_buf_mmap_supported bool Whether a dma-buf can be mapped by the host
153 logical_endpoint_unicast_supported bool Whether unicast logical endpoints work
154 logical_endpoint_multicast_supported bool Whether multicast logical endpoints work
155 logical_endpoint_counted_ops_supported bool Whether counted operations on logical endpoints work
156 logical_endpoint_unicast_access_on_owner_device_supported bool Whether an endpoint's owner can access it
157 locality_domain_multiprocessor_count - Multiprocessors of a locality domain
158 logical_endpoint_supported_handle_types mask Handle types for sharing logical endpoints
159 vulkan_cig_streams_supported bool Whether CUDA in graphics with Vulkan takes streams
160 tensor_map_large_tensor_min_size_bytes bytes Minimum tensor that counts as large to a tensor map
161 gpu_direct_rdma_with_localized_memory_supported bool Whether GPUDirect RDMA works with localized memory
"""


# The names of the bits of each bit mask, from bit 0 on.
BIT_NAMES = {
    "gpu_direct_rdma_flush_writes_options": ("host call", "stream memory operation"),
    "mempool_supported_handle_types": (
        "POSIX file descriptor",
        "Win32",
        "Win32 KMT",
        "fabric",
    ),
    "mem_decompress_algorithm_mask": ("Deflate", "Snappy", "LZ4"),
    "logical_endpoint_supported_handle_types": ("fabric",),
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """One CUdevice_attribute."""

    number: int
    name: str
    unit: str  # "bytes", "kHz", "bits", "bool", "mask", "hex", "word" or "" for a plain number
    description: str


def attributes() -> tuple[Attribute, ...]:
    """Return all attributes in the order of CUdevice_attribute."""
    rows = (line.split(" ", 3) for line in _TABLE.strip().splitlines())
    return tuple(
        Attribute(int(number), name, unit.replace("-", ""), description)
        for number, name, unit, description in rows
    )
