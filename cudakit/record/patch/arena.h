/* An arena: device memory to which launches write the addresses of the bytes that they read and write.
 *
 * The patch, which NVRTC compiles, and the recorder, which the C compiler compiles, include this file.
 *
 *     header | bits of lost launches | entries | pages |
 *     keys of tensor maps | keys of boxes | tensor maps | boxes | chunks
 *
 * A *page* records which bytes one launch accessed in one mode. It is a bitmap of 4 KiB, which covers 128 KiB of
 * memory in granules of 4 bytes (level 0), or 32 KiB in granules of 1 byte (level 1). Claiming a page stalls the lanes
 * that need it, so larger pages are faster; but a page of a small allocation is mostly empty, and all of it is copied.
 * Pages are stored in the order in which they were claimed. The entries are a hash table from keys to pages.
 *
 * A *chunk* holds bitmaps, preceded by their *summaries*. A summary has one bit per 32-bit word of the bitmap, which
 * is set when all bits of the word were set at once. If all bits of a summary are set, so are those of the page, and
 * the host need not copy the bitmap. The position of a word's summary bit follows from the address of the word.
 *
 * A *box* is one use of a *tensor map*; the host computes the memory that it covers. Each box and each map is written
 * once, in the order of first use. The hash tables of their keys show which of them are already written.
 *
 * The start of an arena is aligned to 16 MiB. The low 24 bits of a launch's user data hold the launch index and the
 * number of entries of the arena, so that the patch computes all offsets without a load. Arenas lie above the first 4
 * GiB, so that the upper half of the user data shows whether there is an arena.
 */
#ifndef CK_ARENA_H
#define CK_ARENA_H

typedef unsigned int ck_u32;
typedef unsigned long long ck_u64;

/* The mode of an access, and of the page that records it. */
enum ck_mode {
    CK_SYNC = 0, /* access at system scope: to a synchronization variable, not to data */
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

/* Flag of user data that the kernels of a graph share: the launch index of a kernel is the launch index in the user
 * data plus the grid id. */
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
#define CK_ADDRESS_BITS 57 /* number of address bits on x86-64 and Blackwell */

#define CK_BITMAP_LOG2 15
#define CK_BITMAP_BITS (1u << CK_BITMAP_LOG2)
#define CK_BITMAP_BYTES (CK_BITMAP_BITS / 8)
#define CK_BITMAP_WORDS (CK_BITMAP_BITS / 32) /* number of 32-bit words; the patch sets bits by words */
#define CK_GRANULE_SHIFT(level) ((level) ? 0 : 2)
#define CK_PAGE_SHIFT(level) (CK_BITMAP_LOG2 + CK_GRANULE_SHIFT(level)) /* log2 of the bytes of memory per page */

/* --- layout ----------------------------------------------------------------------------------- */

#define CK_FORMAT 3u /* version of this layout */

typedef struct {
    ck_u32 format;
    ck_u32 page_capacity;   /* number of pages in the arena */
    ck_u32 requested_pages; /* number of pages that were requested; may exceed page_capacity */
    ck_u32 lost_launches;   /* number of launches whose accesses are not all recorded */
    ck_u32
        requested_maps; /* numbers of maps and boxes that were requested; may exceed CK_MAX_MAPS and CK_MAX_BOXES */
    ck_u32 requested_boxes;
    ck_u32 pages_offset, chunks_offset; /* offsets, stored because computing them would need more registers */
    ck_u32 reserved[24];
} ck_header;

typedef struct { /* entry of the hash table; read by one 16-byte load */
    ck_u64 key;  /* 0 if the entry is free */
    ck_u64
        bitmap; /* address of the page's bitmap; 0 while the page is being claimed; CK_NO_PAGE if no page was left */
} ck_entry;

#define CK_NO_PAGE 1ull

typedef struct {
    ck_u64 key;
    ck_u32 is_full; /* set by the host if all bits of the bitmap are set; the bitmap is then unused */
    ck_u32 reserved;
} ck_page;

/* A CUtensorMap has 128 bytes, but the device reads only the first 64. cuBLAS stores one map every 64 bytes. */
#define CK_MAP_WORDS 8

typedef struct { /* copy of a tensor map, made when it is first used */
    ck_u64 content[CK_MAP_WORDS];
    ck_u32 slot; /* slot of the map's key; boxes refer to the map by this slot */
    ck_u32 reserved[3];
} ck_map;

typedef struct { /* one use of a tensor map */
    ck_u32 launch;
    unsigned short map; /* slot of the map's key, or CK_NO_MAP */
    unsigned short mode;
    ck_u32 word[12]; /* arguments of the callback that follow the map; see accesses.cu */
} ck_box;

#define CK_NO_MAP 0xFFFFu
#define CK_MAX_MAPS 4096u
#define CK_MAX_BOXES (1u << 18)
/* The hash tables stay sparse: there are two key slots per map or box, and four entries per page. In a fuller
 * table, many accesses would take the slow path, because the first entry at the hash of their page belongs to
 * another page. */
#define CK_MAP_KEYS (2 * CK_MAX_MAPS)
#define CK_BOX_KEYS (2 * CK_MAX_BOXES)
#define CK_MAX_PAGES(entries_log2) (1ull << ((entries_log2) - 2))

/* The entries precede the other tables, so that their offset fits into a load instruction. */
#define CK_LOST_OFFSET 4096ull
#define CK_ENTRIES_OFFSET (CK_LOST_OFFSET + CK_MAX_LAUNCHES / 8)
#define CK_PAGES_OFFSET(entries_log2) (CK_ENTRIES_OFFSET + (sizeof(ck_entry) << (entries_log2)))
#define CK_MAP_KEYS_OFFSET(entries_log2) \
    (CK_ENTRIES_OFFSET + ((sizeof(ck_entry) + sizeof(ck_page) / 4) \
                          << (entries_log2))) /* the keys follow the pages, one for every four entries */
#define CK_BOX_KEYS_OFFSET(entries_log2) (CK_MAP_KEYS_OFFSET(entries_log2) + CK_MAP_KEYS * sizeof(ck_u64))
#define CK_MAPS_OFFSET(entries_log2) (CK_BOX_KEYS_OFFSET(entries_log2) + CK_BOX_KEYS * sizeof(ck_u64))
#define CK_BOXES_OFFSET(entries_log2) (CK_MAPS_OFFSET(entries_log2) + CK_MAX_MAPS * sizeof(ck_map))
#define CK_CHUNKS_OFFSET(entries_log2) \
    ((CK_BOXES_OFFSET(entries_log2) + CK_MAX_BOXES * sizeof(ck_box) + CK_CHUNK - 1) & ~(CK_CHUNK - 1))

/* --- chunks -------------------------------------------------------------------------------------- */

#define CK_CHUNK CK_ALIGNMENT
#define CK_SUMMARY_BYTES (CK_BITMAP_BYTES / 32)
#define CK_FIRST_SLOT \
    (CK_CHUNK / CK_BITMAP_BYTES * CK_SUMMARY_BYTES / \
     CK_BITMAP_BYTES) /* first slot of a chunk that holds a bitmap; the earlier slots hold summaries */
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

/* A summary has one bit per word of a bitmap. The macros return the address of the summary word with this bit, and
 * the number of the bit. ``word`` is the lower half of the bitmap word's address. */
#define CK_SUMMARY_OF(word) (((word) & ~(ck_u32)(CK_CHUNK - 1)) | ((word) >> 5 & (ck_u32)(CK_CHUNK / 32 - 4)))
#define CK_SUMMARY_BIT(word) ((word) >> 2 & 31)

/* Before an arena is reused, the host sets to zero: the counters of the header; the bits of lost launches; the
 * entries; the keys of maps and boxes, if there are any; and the claimed pages with their bitmaps and summaries. */

#ifdef __cplusplus
#define CK_STATIC_ASSERT static_assert
#else
#define CK_STATIC_ASSERT _Static_assert
#endif
CK_STATIC_ASSERT(sizeof(ck_u32) == 4 && sizeof(ck_u64) == 8, "integers have these sizes");
CK_STATIC_ASSERT(sizeof(ck_header) == 128 && sizeof(ck_header) <= CK_LOST_OFFSET, "size of the header");
CK_STATIC_ASSERT(sizeof(ck_entry) == 16 && sizeof(ck_page) == 16, "sizes of entries and pages");
CK_STATIC_ASSERT(sizeof(ck_map) == 80 && sizeof(ck_box) == 56, "sizes of maps and boxes");
CK_STATIC_ASSERT(CK_MAP_KEYS <= CK_NO_MAP, "slots of maps fit into 16 bits");
CK_STATIC_ASSERT(CK_ENTRIES_OFFSET % 128 == 0, "eight entries per cache line");
CK_STATIC_ASSERT(CK_ENTRIES_OFFSET < 1u << 23, "the offset fits into a load instruction");
CK_STATIC_ASSERT(CK_MAPS_OFFSET(CK_MIN_ENTRIES_LOG2) % 128 == 0, "maps are aligned to cache lines");
CK_STATIC_ASSERT(CK_CHUNKS_OFFSET(CK_MAX_ENTRIES_LOG2) < 1ull << 32, "offsets outside of chunks fit into 32 bits");
CK_STATIC_ASSERT(CK_FIRST_SLOT *CK_BITMAP_BYTES == CK_CHUNK / 32, "summaries end where the first bitmap begins");
CK_STATIC_ASSERT(1ull << (CK_LAUNCH_BITS + 5) == CK_BY_GRID && CK_BY_GRID < CK_ALIGNMENT,
                 "launch index and size fit into the bits below the alignment");
CK_STATIC_ASSERT(1 + CK_LAUNCH_BITS + 2 + 1 + CK_PAGE_BITS == 64, "a key has 64 bits");
CK_STATIC_ASSERT(CK_ADDRESS_BITS - CK_PAGE_SHIFT(1) <= CK_PAGE_BITS,
                 "the page number of an address fits into a key");

#endif
