/* An arena: device memory in which launches leave which bytes they read and wrote.
 *
 * Read by both sides: by NVRTC as part of the patch, and by the C compiler as part of the recorder.
 *
 *     header | launches of which something is missing | entries | pages |
 *     keys of tensor maps | keys of boxes | tensor maps | boxes | chunks
 *
 * A *page* is what one launch did, in one mode, to 128 KiB of memory in granules of 4 bytes (level 0), or to
 * 32 KiB in granules of 1 byte (level 1): a bitmap of 4 KiB. All wait for who takes a page that is new, so that
 * larger ones are faster; of what is small, more has to be read. Pages are taken in the order of first touch; the
 * entries are a hash table that finds the page of a key.
 *
 * A *chunk* holds bitmaps, and at its begin their *summaries*: a bit for each word of 32 bits, set where the
 * whole word was set at once. So the host need not copy the bitmaps of what was streamed, nobody has to count,
 * and the place of a word in the summary follows from its own.
 *
 * A *box* is one use of a *tensor map*: what it covers in memory, the host finds out. Both are written down
 * once, in the order of first use; their keys are hash tables that say what is written already.
 *
 * The begin of an arena is aligned to 16 MiB. The low 24 bits of a launch's user data say which launch it is
 * and how many entries the arena has, so that all offsets follow from the user data, without a load. Arenas
 * lie above the first 4 GiB, so that the upper half of user data says whether there is one.
 */
#ifndef CK_ARENA_H
#define CK_ARENA_H

typedef unsigned int ck_u32;
typedef unsigned long long ck_u64;

enum ck_mode { /* of an access, and of a page */
    CK_SYNC = 0, /* of the whole system: how processors signal each other, not data */
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

/* For kernels of a graph, which share user data: the number of the grid is to be added to the launch. */
#define CK_BY_GRID (1ull << 22)
#define CK_LAUNCH_OF_GRID(userdata, grid) (((ck_u32)(userdata) + (ck_u32)(grid)) & (CK_MAX_LAUNCHES - 1))
#define CK_USERDATA_OF_GRID(userdata, grid) \
    (((userdata) & ~(CK_BY_GRID | (CK_MAX_LAUNCHES - 1))) | CK_LAUNCH_OF_GRID(userdata, grid))

/* --- keys ---------------------------------------------------------------------------------------- */

/* From the top: 1 (so that no key is 0), 17 bits of launch, 2 of mode, 1 of level, 43 of address. */
#define CK_PAGE_BITS 43
#define CK_KEY(launch, mode, level, page) \
    (1ull << 63 | (ck_u64)(launch) << 46 | (ck_u64)(mode) << 44 | (ck_u64)(level) << CK_PAGE_BITS | (page))
#define CK_KEY_LAUNCH(key) ((ck_u32)((key) >> 46) & (CK_MAX_LAUNCHES - 1))
#define CK_KEY_MODE(key) ((ck_u32)((key) >> 44) & 3)
#define CK_KEY_LEVEL(key) ((ck_u32)((key) >> CK_PAGE_BITS) & 1)
#define CK_KEY_PAGE(key) ((key) & ((1ull << CK_PAGE_BITS) - 1))
#define CK_ADDRESS_BITS 57 /* x86-64 and Blackwell have no more */

#define CK_BITMAP_LOG2 15
#define CK_BITMAP_BITS (1u << CK_BITMAP_LOG2)
#define CK_BITMAP_BYTES (CK_BITMAP_BITS / 8)
#define CK_BITMAP_WORDS (CK_BITMAP_BITS / 32) /* words of 32 bits, as the device counts them */
#define CK_GRANULE_SHIFT(level) ((level) ? 0 : 2)
#define CK_PAGE_SHIFT(level) (CK_BITMAP_LOG2 + CK_GRANULE_SHIFT(level)) /* bytes of memory, log 2 */

/* --- parts --------------------------------------------------------------------------------------- */

#define CK_FORM 3u /* of all that this file says */

typedef struct {
    ck_u32 form;
    ck_u32 pages;  /* that there is room for */
    ck_u32 cursor; /* pages that were asked for: may be more than there are */
    ck_u32 lost;   /* launches of which something is missing */
    ck_u32 maps;   /* as for pages */
    ck_u32 boxes;
    ck_u32 pages_at, chunks_at; /* for who has no register left to compute them */
    ck_u32 reserved[24];
} ck_header;

typedef struct { /* of the hash table; read by one load of 16 bytes */
    ck_u64 key;    /* 0: free */
    ck_u64 bitmap; /* the address of the page's bitmap; 0: being taken; CK_NO_PAGE: there was none */
} ck_entry;

#define CK_NO_PAGE 1ull

typedef struct {
    ck_u64 key;
    ck_u32 full; /* on the host: every bit is set, whatever its bitmap there says */
    ck_u32 reserved;
} ck_page;

/* Of the 128 bytes that CUDA gives a tensor map, the device reads the first half: cuBLAS has one every 64. */
#define CK_MAP_WORDS 8

typedef struct { /* what a tensor map held when it was used */
    ck_u64 content[CK_MAP_WORDS];
    ck_u32 place; /* among the keys: what boxes call it by */
    ck_u32 reserved[3];
} ck_map;

typedef struct { /* one use of a tensor map */
    ck_u32 launch;
    unsigned short map; /* its place, or CK_NO_MAP */
    unsigned short mode;
    ck_u32 word[12]; /* the arguments of the callback behind the map, see accesses.cu */
} ck_box;

#define CK_NO_MAP 0xFFFFu
#define CK_MAX_MAPS 4096u
#define CK_MAX_BOXES (1u << 17)
/* At most half of the keys are ever taken, and a quarter of the entries as long as there are pages: a page whose
 * first entry is another's is found the long way. */
#define CK_MAP_KEYS (2 * CK_MAX_MAPS)
#define CK_BOX_KEYS (2 * CK_MAX_BOXES)
#define CK_MAX_PAGES(entries_log2) (1ull << ((entries_log2) - 2))

/* The entries come first: a load has room for a small offset. */
#define CK_LOST_AT 4096ull
#define CK_ENTRIES_AT (CK_LOST_AT + CK_MAX_LAUNCHES / 8)
#define CK_PAGES_AT(entries_log2) (CK_ENTRIES_AT + (sizeof(ck_entry) << (entries_log2)))
#define CK_MAP_KEYS_AT(entries_log2) \
    (CK_ENTRIES_AT + ((sizeof(ck_entry) + sizeof(ck_page) / 4) << (entries_log2))) /* behind CK_MAX_PAGES */
#define CK_BOX_KEYS_AT(entries_log2) (CK_MAP_KEYS_AT(entries_log2) + CK_MAP_KEYS * sizeof(ck_u64))
#define CK_MAPS_AT(entries_log2) (CK_BOX_KEYS_AT(entries_log2) + CK_BOX_KEYS * sizeof(ck_u64))
#define CK_BOXES_AT(entries_log2) (CK_MAPS_AT(entries_log2) + CK_MAX_MAPS * sizeof(ck_map))
#define CK_CHUNKS_AT(entries_log2) \
    ((CK_BOXES_AT(entries_log2) + CK_MAX_BOXES * sizeof(ck_box) + CK_CHUNK - 1) & ~(CK_CHUNK - 1))

/* --- chunks -------------------------------------------------------------------------------------- */

#define CK_CHUNK CK_ALIGNMENT
#define CK_SUMMARY_BYTES (CK_BITMAP_BYTES / 32)
#define CK_FIRST_SLOT (CK_CHUNK / CK_BITMAP_BYTES * CK_SUMMARY_BYTES / CK_BITMAP_BYTES) /* for a bitmap */
#define CK_CHUNK_PAGES (CK_CHUNK / CK_BITMAP_BYTES - CK_FIRST_SLOT)
#define CK_SLOT_OF_PAGE(page) ((page) + (ck_u32)CK_FIRST_SLOT * (1 + (page) / (ck_u32)CK_CHUNK_PAGES))
#define CK_BITMAP_AT(entries_log2, page) \
    (CK_CHUNKS_AT(entries_log2) + (ck_u64)CK_SLOT_OF_PAGE(page) * CK_BITMAP_BYTES)
#define CK_SUMMARY_AT(entries_log2, page) \
    (CK_CHUNKS_AT(entries_log2) + (page) / (ck_u32)CK_CHUNK_PAGES * CK_CHUNK + \
     (CK_FIRST_SLOT + (page) % (ck_u32)CK_CHUNK_PAGES) * CK_SUMMARY_BYTES)
#define CK_ARENA_BYTES(entries_log2, pages) \
    ((pages) ? CK_BITMAP_AT(entries_log2, (ck_u32)(pages) - 1) + CK_BITMAP_BYTES : CK_CHUNKS_AT(entries_log2))

/* Where the summary has the bit of a word, by the lower half of the word's address: the word to look at, and
 * which bit. */
#define CK_SUMMARY_OF(word) (((word) & ~(ck_u32)(CK_CHUNK - 1)) | ((word) >> 5 & (ck_u32)(CK_CHUNK / 32 - 4)))
#define CK_SUMMARY_BIT(word) ((word) >> 2 & 31)

/* To be zeros before an arena is used again: of the header, what counts; the bits of launches; the entries;
 * the keys of maps and of boxes, where there were any; and the pages that were taken, with their bitmaps and
 * summaries. */

#ifdef __cplusplus
#define CK_STATIC_ASSERT static_assert
#else
#define CK_STATIC_ASSERT _Static_assert
#endif
CK_STATIC_ASSERT(sizeof(ck_u32) == 4 && sizeof(ck_u64) == 8, "sizes of integers");
CK_STATIC_ASSERT(sizeof(ck_header) == 128 && sizeof(ck_header) <= CK_LOST_AT, "header");
CK_STATIC_ASSERT(sizeof(ck_entry) == 16 && sizeof(ck_page) == 16, "entries and pages");
CK_STATIC_ASSERT(sizeof(ck_map) == 80 && sizeof(ck_box) == 56, "maps and boxes");
CK_STATIC_ASSERT(CK_MAP_KEYS <= CK_NO_MAP, "places of maps in 16 bits");
CK_STATIC_ASSERT(CK_ENTRIES_AT % 128 == 0, "eight entries to a line of the cache");
CK_STATIC_ASSERT(CK_ENTRIES_AT < 1u << 23, "in the offset of a load");
CK_STATIC_ASSERT(CK_MAPS_AT(CK_MIN_ENTRIES_LOG2) % 128 == 0, "maps at lines of the cache");
CK_STATIC_ASSERT(CK_CHUNKS_AT(CK_MAX_ENTRIES_LOG2) < 1ull << 32, "offsets, but in chunks, in 32 bits");
CK_STATIC_ASSERT(CK_FIRST_SLOT * CK_BITMAP_BYTES == CK_CHUNK / 32, "summaries before the first bitmap");
CK_STATIC_ASSERT(1ull << (CK_LAUNCH_BITS + 5) == CK_BY_GRID && CK_BY_GRID < CK_ALIGNMENT,
                 "user data in the bits of the alignment");
CK_STATIC_ASSERT(1 + CK_LAUNCH_BITS + 2 + 1 + CK_PAGE_BITS == 64, "bits of a key");
CK_STATIC_ASSERT(CK_ADDRESS_BITS - CK_PAGE_SHIFT(1) <= CK_PAGE_BITS, "addresses in a key");

#endif
