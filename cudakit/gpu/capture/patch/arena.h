/* An arena: device memory to which launches write the addresses of the bytes that they read and write.
 *
 * Included by both sides: by NVRTC in the patch, and by the C compiler in the recorder.
 *
 *     header | bits of lost launches | entries | pages |
 *     keys of tensor maps | keys of boxes | tensor maps | boxes | chunks
 *
 * A *page* is what one launch accessed, in one mode, in 128 KiB of memory in granules of 4 bytes (level 0), or
 * in 32 KiB in granules of 1 byte (level 1): a bitmap of 4 KiB. Claiming a page stalls the lanes that need it,
 * so larger pages are faster; but a page of a small allocation is mostly empty and is copied as a whole. Pages are in the order of first
 * access. The entries are a hash table from keys to pages.
 *
 * A *chunk* holds bitmaps, preceded by their *summaries*: one bit per 32-bit word, set if the whole word was set
 * at once. A page whose summary is all ones was streamed: the host need not copy its bitmap. Summaries need no
 * counters, and the position of a word's summary bit follows from the address of the word.
 *
 * A *box* is one use of a *tensor map*; the host computes the memory that it covers. Both are written once, in
 * the order of first use; their keys are hash tables that show what is already written.
 *
 * The start of an arena is aligned to 16 MiB. The low 24 bits of a launch's user data hold the launch index and
 * the number of entries of the arena, so that all offsets follow from the user data without a load. Arenas lie
 * above the first 4 GiB, so that the upper half of the user data shows whether there is one.
 */
#ifndef CK_ARENA_H
#define CK_ARENA_H

typedef unsigned int ck_u32;
typedef unsigned long long ck_u64;

/* The mode of an access, and of the page that records it. */
enum ck_mode {
    CK_SYNC = 0, /* system-scope synchronisation, not data */
    CK_READ = 1,
    CK_WRITE = 2,
    CK_ATOMIC = 3,
    CK_MODES = 4,
};

/* --- user data ----------------------------------------------------------------------------------- */

#define CK_ALIGNMENT (1ull << 24)
#define CK_LOWEST_BASE (1ull << 32)
#define CK_LAUNCH_BITS 17
#define CK_MAX_LAUNCHES (1u << CK_LAUNCH_BITS)
#define CK_MIN_ENTRIES_LOG2 8
#define CK_MAX_ENTRIES_LOG2 24
#define CK_USERDATA(base, entries_log2, launch) \
    ((ck_u64)(base) | (ck_u64)(entries_log2) << CK_LAUNCH_BITS | (ck_u64)(launch))
#define CK_BASE_OF(userdata) ((userdata) & ~(CK_ALIGNMENT - 1))
#define CK_LAUNCH_OF(userdata) ((ck_u32)(userdata) & (CK_MAX_LAUNCHES - 1))
#define CK_ENTRIES_LOG2_OF(userdata) ((ck_u32)((userdata) >> CK_LAUNCH_BITS) & 31)

/* For kernels of a graph, which share user data: add the grid id to the launch index. */
#define CK_BY_GRID (1ull << 22)
#define CK_LAUNCH_OF_GRID(userdata, grid) (((ck_u32)(userdata) + (ck_u32)(grid)) & (CK_MAX_LAUNCHES - 1))
#define CK_USERDATA_OF_GRID(userdata, grid) \
    (((userdata) & ~(CK_BY_GRID | (CK_MAX_LAUNCHES - 1))) | CK_LAUNCH_OF_GRID(userdata, grid))

/* --- keys ---------------------------------------------------------------------------------------- */

/* From the most significant bit: 1 (so that no key is 0), 17 bits of launch, 2 of mode, 1 of level, 43 of
 * address. */
#define CK_PAGE_BITS 43
#define CK_KEY(launch, mode, level, page) \
    (1ull << 63 | (ck_u64)(launch) << 46 | (ck_u64)(mode) << 44 | (ck_u64)(level) << CK_PAGE_BITS | (page))
#define CK_KEY_LAUNCH(key) ((ck_u32)((key) >> 46) & (CK_MAX_LAUNCHES - 1))
#define CK_KEY_MODE(key) ((ck_u32)((key) >> 44) & 3)
#define CK_KEY_LEVEL(key) ((ck_u32)((key) >> CK_PAGE_BITS) & 1)
#define CK_KEY_PAGE(key) ((key) & ((1ull << CK_PAGE_BITS) - 1))
#define CK_ADDRESS_BITS 57 /* of x86-64 and Blackwell */

#define CK_BITMAP_LOG2 15
#define CK_BITMAP_BITS (1u << CK_BITMAP_LOG2)
#define CK_BITMAP_BYTES (CK_BITMAP_BITS / 8)
#define CK_BITMAP_WORDS (CK_BITMAP_BITS / 32) /* 32-bit words, as on the device */
#define CK_GRANULE_SHIFT(level) ((level) ? 0 : 2)
#define CK_PAGE_SHIFT(level) (CK_BITMAP_LOG2 + CK_GRANULE_SHIFT(level)) /* log2 of the bytes of memory per page */

/* --- layout ----------------------------------------------------------------------------------- */

#define CK_FORMAT 3u /* version of this layout */

typedef struct {
    ck_u32 format;
    ck_u32 page_capacity;   /* capacity */
    ck_u32 requested_pages; /* requested pages; may exceed the capacity */
    ck_u32 lost_launches;   /* number of launches with missing accesses */
    ck_u32 requested_maps;  /* like cursor, for maps and boxes */
    ck_u32 requested_boxes;
    ck_u32 pages_offset, chunks_offset; /* precomputed, because the patch has no register left */
    ck_u32 reserved[24];
} ck_header;

typedef struct {   /* of the hash table; read by one 16-byte load */
    ck_u64 key;    /* 0: free */
    ck_u64 bitmap; /* address of the page's bitmap; 0: being claimed; CK_NO_PAGE: none was left */
} ck_entry;

#define CK_NO_PAGE 1ull

typedef struct {
    ck_u64 key;
    ck_u32 full; /* on the host: every bit is set; the bitmap is not used */
    ck_u32 reserved;
} ck_page;

/* A CUtensorMap has 128 bytes, but the device reads only the first 64: cuBLAS has one every 64 bytes. */
#define CK_MAP_WORDS 8

typedef struct { /* a copy of a tensor map at its use */
    ck_u64 content[CK_MAP_WORDS];
    ck_u32 slot; /* hash slot, by which boxes refer to the map */
    ck_u32 reserved[3];
} ck_map;

typedef struct { /* one use of a tensor map */
    ck_u32 launch;
    unsigned short map; /* its hash slot, or CK_NO_MAP */
    unsigned short mode;
    ck_u32 word[12]; /* the arguments of the callback after the map, see accesses.cu */
} ck_box;

#define CK_NO_MAP 0xFFFFu
#define CK_MAX_MAPS 4096u
#define CK_MAX_BOXES (1u << 18)
/* At most half of the key slots are ever taken, and a quarter of the entries while pages are left: a page
 * whose first entry belongs to another page takes the slow path. */
#define CK_MAP_KEYS (2 * CK_MAX_MAPS)
#define CK_BOX_KEYS (2 * CK_MAX_BOXES)
#define CK_MAX_PAGES(entries_log2) (1ull << ((entries_log2) - 2))

/* The entries come first, so that their offset fits into a load instruction. */
#define CK_LOST_OFFSET 4096ull
#define CK_ENTRIES_OFFSET (CK_LOST_OFFSET + CK_MAX_LAUNCHES / 8)
#define CK_PAGES_OFFSET(entries_log2) (CK_ENTRIES_OFFSET + (sizeof(ck_entry) << (entries_log2)))
#define CK_MAP_KEYS_OFFSET(entries_log2) \
    (CK_ENTRIES_OFFSET + \
     ((sizeof(ck_entry) + sizeof(ck_page) / 4) << (entries_log2))) /* after CK_MAX_PAGES pages */
#define CK_BOX_KEYS_OFFSET(entries_log2) (CK_MAP_KEYS_OFFSET(entries_log2) + CK_MAP_KEYS * sizeof(ck_u64))
#define CK_MAPS_OFFSET(entries_log2) (CK_BOX_KEYS_OFFSET(entries_log2) + CK_BOX_KEYS * sizeof(ck_u64))
#define CK_BOXES_OFFSET(entries_log2) (CK_MAPS_OFFSET(entries_log2) + CK_MAX_MAPS * sizeof(ck_map))
#define CK_CHUNKS_OFFSET(entries_log2) \
    ((CK_BOXES_OFFSET(entries_log2) + CK_MAX_BOXES * sizeof(ck_box) + CK_CHUNK - 1) & ~(CK_CHUNK - 1))

/* --- chunks -------------------------------------------------------------------------------------- */

#define CK_CHUNK CK_ALIGNMENT
#define CK_SUMMARY_BYTES (CK_BITMAP_BYTES / 32)
#define CK_FIRST_SLOT \
    (CK_CHUNK / CK_BITMAP_BYTES * CK_SUMMARY_BYTES / CK_BITMAP_BYTES) /* the first one that holds a bitmap */
#define CK_CHUNK_PAGES (CK_CHUNK / CK_BITMAP_BYTES - CK_FIRST_SLOT)
#define CK_SLOT_OF_PAGE(page) ((page) + (ck_u32)CK_FIRST_SLOT * (1 + (page) / (ck_u32)CK_CHUNK_PAGES))
#define CK_BITMAP_OFFSET(entries_log2, page) \
    (CK_CHUNKS_OFFSET(entries_log2) + (ck_u64)CK_SLOT_OF_PAGE(page) * CK_BITMAP_BYTES)
#define CK_SUMMARY_OFFSET(entries_log2, page) \
    (CK_CHUNKS_OFFSET(entries_log2) + (page) / (ck_u32)CK_CHUNK_PAGES * CK_CHUNK + \
     (CK_FIRST_SLOT + (page) % (ck_u32)CK_CHUNK_PAGES) * CK_SUMMARY_BYTES)
#define CK_ARENA_BYTES(entries_log2, pages) \
    ((pages) ? CK_BITMAP_OFFSET(entries_log2, (ck_u32)(pages) - 1) + CK_BITMAP_BYTES \
             : CK_CHUNKS_OFFSET(entries_log2))

/* Address and bit of a word's summary, from the lower half of the word's address. */
#define CK_SUMMARY_OF(word) (((word) & ~(ck_u32)(CK_CHUNK - 1)) | ((word) >> 5 & (ck_u32)(CK_CHUNK / 32 - 4)))
#define CK_SUMMARY_BIT(word) ((word) >> 2 & 31)

/* Must be zero before an arena is reused: the counters of the header; the bits of lost launches; the
 * entries; the keys of maps and boxes, if there are any; and the claimed pages, with their bitmaps and
 * summaries. */

#ifdef __cplusplus
#define CK_STATIC_ASSERT static_assert
#else
#define CK_STATIC_ASSERT _Static_assert
#endif
CK_STATIC_ASSERT(sizeof(ck_u32) == 4 && sizeof(ck_u64) == 8, "sizes of integers");
CK_STATIC_ASSERT(sizeof(ck_header) == 128 && sizeof(ck_header) <= CK_LOST_OFFSET, "header");
CK_STATIC_ASSERT(sizeof(ck_entry) == 16 && sizeof(ck_page) == 16, "entries and pages");
CK_STATIC_ASSERT(sizeof(ck_map) == 80 && sizeof(ck_box) == 56, "maps and boxes");
CK_STATIC_ASSERT(CK_MAP_KEYS <= CK_NO_MAP, "places of maps in 16 bits");
CK_STATIC_ASSERT(CK_ENTRIES_OFFSET % 128 == 0, "eight entries to a line of the cache");
CK_STATIC_ASSERT(CK_ENTRIES_OFFSET < 1u << 23, "in the offset of a load");
CK_STATIC_ASSERT(CK_MAPS_OFFSET(CK_MIN_ENTRIES_LOG2) % 128 == 0, "maps at lines of the cache");
CK_STATIC_ASSERT(CK_CHUNKS_OFFSET(CK_MAX_ENTRIES_LOG2) < 1ull << 32, "offsets, but in chunks, in 32 bits");
CK_STATIC_ASSERT(CK_FIRST_SLOT *CK_BITMAP_BYTES == CK_CHUNK / 32, "summaries before the first bitmap");
CK_STATIC_ASSERT(1ull << (CK_LAUNCH_BITS + 5) == CK_BY_GRID && CK_BY_GRID < CK_ALIGNMENT,
                 "user data in the bits of the alignment");
CK_STATIC_ASSERT(1 + CK_LAUNCH_BITS + 2 + 1 + CK_PAGE_BITS == 64, "bits of a key");
CK_STATIC_ASSERT(CK_ADDRESS_BITS - CK_PAGE_SHIFT(1) <= CK_PAGE_BITS, "addresses in a key");

#endif
