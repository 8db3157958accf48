typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FOR_EACH_INDEX(count) \
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void cudakit_differ(u64* wrong, const u32* one, const u32* other, u64 count) {
    u64 found = 0;
    FOR_EACH_INDEX(count) found += one[i] != other[i];
    if (found) atomicAdd(wrong, found);
}

extern "C" __global__ void cudakit_differ_from_word(u64* wrong, const u32* words, u32 word, u64 count) {
    u64 found = 0;
    FOR_EACH_INDEX(count) found += words[i] != word;
    if (found) atomicAdd(wrong, found);
}

extern "C" __global__ void cudakit_gather(
    void* to, const void* from, const u64* indices, u64 count, int size) {
    FOR_EACH_INDEX(count) switch (size) {
        case 1: ((u8*)to)[i] = ((const u8*)from)[indices[i]]; break;
        case 2: ((u16*)to)[i] = ((const u16*)from)[indices[i]]; break;
        case 4: ((u32*)to)[i] = ((const u32*)from)[indices[i]]; break;
        case 8: ((u64*)to)[i] = ((const u64*)from)[indices[i]]; break;
    }
}
