typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(2) half { u16 bits; };
struct alignas(2) bfloat { u16 bits; };

template <class T> struct alignas(2 * sizeof(T)) complex {
    T re, im;
    complex() = default;
    __device__ complex(T re, T im = T(0)) : re(re), im(im) {}
    template <class U> __device__ explicit complex(complex<U> z) : re(z.re), im(z.im) {}
};

// Conversion between elements in memory and values.
template <class T> __device__ T load_value(T element) { return element; }
__device__ float load_value(half element) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element.bits));
    return value;
}
__device__ float load_value(bfloat element) { return __uint_as_float((u32)element.bits << 16); }

template <class T> struct stored {
    template <class V> static __device__ T from(V value) { return (T)value; }
};
template <> struct stored<half> {
    static __device__ half from(float value) {
        half element;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element.bits) : "f"(value));
        return element;
    }
    static __device__ half from(double value) {
        half element;
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(element.bits) : "d"(value));
        return element;
    }
    template <class V> static __device__ half from(V value) { return from((float)value); }
};
template <> struct stored<bfloat> {
    template <class V> static __device__ bfloat from(V value) {
        const u32 word = __float_as_uint((float)value);
        const u32 rounded = (word + 0x7FFFu + ((word >> 16) & 1)) >> 16;
        return bfloat{(u16)((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFF : rounded)};
    }
};
// A value rounded to an element type.
template <class T, class V> __device__ auto rounded(V value) { return load_value(stored<T>::from(value)); }

namespace op {
// Integers wrap around: the arithmetic is unsigned, because signed overflow is undefined in C++.
template <class T> struct wrapping { typedef T type; };
template <> struct wrapping<int> { typedef u32 type; };
template <> struct wrapping<long long> { typedef u64 type; };
#define ARITHMETIC(NAME, OPERATOR) \
    template <class T> __device__ T NAME(T a, T b) { \
        typedef typename wrapping<T>::type U; \
        return (T)((U)a OPERATOR (U)b); \
    } \
    template <class T> __device__ complex<T> NAME(complex<T> a, complex<T> b);
ARITHMETIC(add, +)
ARITHMETIC(subtract, -)
ARITHMETIC(multiply, *)
template <class T> __device__ complex<T> add(complex<T> a, complex<T> b) {
    return {a.re + b.re, a.im + b.im};
}
template <class T> __device__ complex<T> subtract(complex<T> a, complex<T> b) {
    return {a.re - b.re, a.im - b.im};
}
template <class T> __device__ complex<T> multiply(complex<T> a, complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> __device__ T divide(T a, T b) { return a / b; }
// The larger part of the divisor is factored out, which avoids overflow (R. L. Smith, CACM 5(8), 1962).
template <class T> __device__ complex<T> divide(complex<T> a, complex<T> b) {
    if (fabs(b.re) >= fabs(b.im)) {
        const T ratio = b.im / b.re, scale = b.re + b.im * ratio;
        return {(a.re + a.im * ratio) / scale, (a.im - a.re * ratio) / scale};
    }
    const T ratio = b.re / b.im, scale = b.re * ratio + b.im;
    return {(a.re * ratio + a.im) / scale, (a.im * ratio - a.re) / scale};
}

// Division rounds down as in Python. A division of integers by 0 is 0.
template <class T> __device__ T remainder(T a, T b) {
    if (b == 0 || (b == (T)-1 && (T)-1 < 0)) return 0;
    const T r = (T)(a % b);
    return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> __device__ T floor_divide(T a, T b) {
    if (b == 0) return 0;
    if (b == (T)-1 && (T)-1 < 0) return subtract((T)0, a);
    const T q = (T)(a / b);
    return a % b != 0 && (a < 0) != (b < 0) ? (T)(q - 1) : q;
}
template <class T> __device__ T remainder_of_floats(T a, T b) {
    const T r = fmod(a, b);
    if (r != 0) return (r < 0) != (b < 0) ? r + b : r;
    return copysign((T)0, b);
}
template <class T> __device__ T floor_divide_floats(T a, T b) {
    if (b == 0) return a / b;
    const T r = fmod(a, b);
    T q = (a - r) / b;
    if (r != 0 && (b < 0) != (r < 0)) q -= 1;
    if (q == 0) return copysign((T)0, a / b);
    const T down = ::floor(q);
    return q - down > (T)0.5 ? down + 1 : down;
}
__device__ float remainder(float a, float b) { return remainder_of_floats(a, b); }
__device__ double remainder(double a, double b) { return remainder_of_floats(a, b); }
__device__ float floor_divide(float a, float b) { return floor_divide_floats(a, b); }
__device__ double floor_divide(double a, double b) { return floor_divide_floats(a, b); }

// A negative power of an integer is 0, except those of 1 and -1.
template <class T> __device__ T power(T base, T exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == (T)-1 ? (exponent % 2 ? base : (T)1) : (T)0;
    T result = 1;
    for (; exponent; exponent >>= 1, base = multiply(base, base))
        if (exponent & 1) result = multiply(result, base);
    return result;
}
__device__ float power(float a, float b) { return powf(a, b); }
__device__ double power(double a, double b) { return pow(a, b); }

template <class T> __device__ T negative(T a) { return subtract((T)0, a); }
__device__ bool negative(bool a) { return a; }
__device__ float negative(float a) { return -a; }
__device__ double negative(double a) { return -a; }
template <class T> __device__ complex<T> negative(complex<T> a) { return {-a.re, -a.im}; }
template <class T> __device__ T positive(T a) { return a; }
template <class T> __device__ T abs(T a) { return a < 0 ? negative(a) : a; }
__device__ bool abs(bool a) { return a; }
__device__ float abs(float a) { return fabsf(a); }
__device__ double abs(double a) { return fabs(a); }
__device__ float abs(complex<float> a) { return hypotf(a.re, a.im); }
__device__ double abs(complex<double> a) { return ::hypot(a.re, a.im); }
template <class T> __device__ T sign(T a) { return a != a ? a : (T)((T)(a > 0) - (T)(a < 0)); }
__device__ bool sign(bool a) { return a; }

template <class T> __device__ T bitwise_and(T a, T b) { return (T)(a & b); }
template <class T> __device__ T bitwise_or(T a, T b) { return (T)(a | b); }
template <class T> __device__ T bitwise_xor(T a, T b) { return (T)(a ^ b); }
template <class T> __device__ T invert(T a) { return (T)~a; }
__device__ bool invert(bool a) { return !a; }
// A shift by the width of the type or more shifts out all bits.
template <class T> __device__ T left_shift(T a, T b) {
    return (u64)b < 8 * sizeof(T) ? (T)((u64)a << b) : (T)0;
}
template <class T> __device__ T right_shift(T a, T b) {
    return (u64)b < 8 * sizeof(T) ? (T)(a >> b) : a < 0 ? (T)-1 : (T)0;
}

template <class T> __device__ bool equal(T a, T b) { return a == b; }
template <class T> __device__ bool equal(complex<T> a, complex<T> b) { return a.re == b.re && a.im == b.im; }
template <class T> __device__ bool not_equal(T a, T b) { return !equal(a, b); }
template <class T> __device__ bool less(T a, T b) { return a < b; }
template <class T> __device__ bool less_equal(T a, T b) { return a <= b; }
template <class T> __device__ bool greater(T a, T b) { return a > b; }
template <class T> __device__ bool greater_equal(T a, T b) { return a >= b; }
__device__ bool logical_and(bool a, bool b) { return a && b; }
__device__ bool logical_or(bool a, bool b) { return a || b; }
__device__ bool logical_not(bool a) { return !a; }
template <class T> __device__ T where(bool condition, T a, T b) { return condition ? a : b; }
// A NaN operand gives a NaN.
template <class T> __device__ T minimum(T a, T b) { return a != a || a < b ? a : b; }
template <class T> __device__ T maximum(T a, T b) { return a != a || a > b ? a : b; }
template <class T> __device__ T atan2(T a, T b) { return ::atan2(a, b); }
template <class T> __device__ T hypot(T a, T b) { return ::hypot(a, b); }
template <class T> __device__ T copysign(T a, T b) { return ::copysign(a, b); }
template <class T> __device__ bool isnan(T a) { return a != a; }
template <class T> __device__ bool isinf(T) { return false; }
__device__ bool isinf(float a) { return fabsf(a) == __int_as_float(0x7F800000); }
__device__ bool isinf(double a) { return fabs(a) == __longlong_as_double(0x7FF0000000000000LL); }
template <class T> __device__ bool isfinite(T a) { return !isinf(a) && !isnan(a); }
template <class T> __device__ T real(T a) { return a; }
template <class T> __device__ T real(complex<T> a) { return a.re; }
template <class T> __device__ T imag(T) { return 0; }
template <class T> __device__ T imag(complex<T> a) { return a.im; }
template <class T> __device__ T conj(T a) { return a; }
template <class T> __device__ complex<T> conj(complex<T> a) { return {a.re, -a.im}; }

#define FLOAT_FUNCTION(NAME) \
    __device__ float NAME(float a) { return ::NAME##f(a); } \
    __device__ double NAME(double a) { return ::NAME(a); }
FLOAT_FUNCTION(exp) FLOAT_FUNCTION(exp2) FLOAT_FUNCTION(expm1) FLOAT_FUNCTION(log) FLOAT_FUNCTION(log2)
FLOAT_FUNCTION(log10) FLOAT_FUNCTION(log1p) FLOAT_FUNCTION(sqrt) FLOAT_FUNCTION(rsqrt)
FLOAT_FUNCTION(sin) FLOAT_FUNCTION(cos) FLOAT_FUNCTION(tan) FLOAT_FUNCTION(asin) FLOAT_FUNCTION(acos)
FLOAT_FUNCTION(atan) FLOAT_FUNCTION(sinh) FLOAT_FUNCTION(cosh) FLOAT_FUNCTION(tanh)
FLOAT_FUNCTION(asinh) FLOAT_FUNCTION(acosh) FLOAT_FUNCTION(atanh) FLOAT_FUNCTION(erf) FLOAT_FUNCTION(erfc)
#define ROUNDING_FUNCTION(NAME, CUDA_NAME) \
    template <class T> __device__ T NAME(T a) { return a; } \
    __device__ float NAME(float a) { return ::CUDA_NAME##f(a); } \
    __device__ double NAME(double a) { return ::CUDA_NAME(a); }
ROUNDING_FUNCTION(floor, floor) ROUNDING_FUNCTION(ceil, ceil)
ROUNDING_FUNCTION(round, rint) ROUNDING_FUNCTION(trunc, trunc)
}  // namespace op

template <int SIZE> struct vector_alignment { static const int value = SIZE > 16 ? 16 : SIZE; };
template <class T, int WIDTH> struct alignas(vector_alignment<WIDTH * sizeof(T)>::value) Vector {
    T elements[WIDTH];
};
