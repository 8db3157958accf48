"""How values become bits on the device: what ``gpu.api.elements`` says of numpy, in CUDA C++."""

from __future__ import annotations

SOURCE = r"""
// Nearest value of a narrow format, ties to even; what is too large becomes the largest.
__device__ u32 narrow(float value, int width, int mantissa, int bias, float largest) {
    const u32 sign = __float_as_uint(value) >> 31;
    const float magnitude = fminf(fabsf(value), largest);
    int exponent = (int)(__float_as_uint(magnitude) >> 23) - 127;
    if (exponent < 1 - bias) exponent = 1 - bias;
    const u32 steps = (u32)rintf(ldexpf(magnitude, mantissa - exponent));
    return sign << (width - 1) | (((u32)(exponent + bias - 1) << mantissa) + steps);
}

__device__ int nearest(double value, double least, double most) {
    return (int)rint(fmin(fmax(value, least), most));
}

__device__ void store(void* out, u64 at, int type, double value) {
    const float single = (float)value;
    switch (type) {
        case 0: ((double*)out)[at] = value; break;
        case 1: ((float*)out)[at] = single; break;
        case 2: ((unsigned short*)out)[at] = narrow(single, 16, 10, 15, 65504.0f); break;
        case 3: ((unsigned short*)out)[at] = narrow(single, 16, 7, 127, 3.3895314e38f); break;
        case 4: ((unsigned char*)out)[at] = narrow(single, 8, 3, 7, 448.0f); break;
        case 5: ((unsigned char*)out)[at] = narrow(single, 8, 2, 15, 57344.0f); break;
        case 6: ((signed char*)out)[at] = nearest(value, -128.0, 127.0); break;
        case 7: ((int*)out)[at] = nearest(value, -2147483648.0, 2147483647.0); break;
    }
}
"""
