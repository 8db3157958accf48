// The free memory in segments after every event: its size, its largest block, and its fragmentation.

import { nextTask } from "./arrays.js";

const SLICE_MS = 8; // time of one task in the background
const EVENTS_PER_CHECK = 2000; // number of events between two reads of the clock

/**
 * Computes the largest free block after every event in the background, in tasks of a few milliseconds.
 *
 * `ready` is a promise of the two curves to draw, `share` and `fragmentation`; item e + 1 of a curve is the state after
 * event e. External fragmentation is the share of the free memory outside the largest free block.
 */
export class FreeMemory {
  constructor(model) {
    this.model = model;
    this.largest = null;
    this.ready = this.#compute();
  }

  async #compute() {
    const { model } = this;
    const largest = new Float64Array(model.events + 1);
    const work = sweep(model, largest);
    for (let done = false; !done; ) {
      const stop = performance.now() + SLICE_MS;
      while (!done && performance.now() < stop) done = work.next().done;
      if (!done) await nextTask();
    }
    this.largest = largest;
    const curves = { share: new Float32Array(largest.length), fragmentation: new Float32Array(largest.length) };
    for (let event = -1; event < model.events; event++) {
      const { share, fragmentation } = this.at(event);
      curves.share[event + 1] = share;
      curves.fragmentation[event + 1] = fragmentation;
    }
    return curves;
  }

  /** Return the free memory after an event, or null while the curves are computed. */
  at(event) {
    if (!this.largest) return null;
    const { reserved, active } = this.model.curves;
    const largest = this.largest[event + 1];
    const free = Math.max(reserved[event + 1] - active[event + 1], 0);
    return { free, largest, share: free / Math.max(reserved[event + 1], 1), fragmentation: free ? Math.max(0, 1 - largest / free) : 0 };
  }
}

/** Write the size of the largest free block after each event into `largest`; yield every EVENTS_PER_CHECK events. */
function* sweep(model, largest) {
  const { begin, end, byEnd, address, size, count, events, arrays } = model;
  const segments = segmentChanges(arrays);
  const { segment_address: starts, segment_size: sizes } = arrays;
  const gaps = new Gaps([address, starts, Float64Array.from(starts, (start, i) => start + sizes[i])]);
  yield;
  let [begun, ended, changed] = [0, 0, 0];
  for (let event = -1; event < events; event++) {
    // A block that ends with an event is removed before another one begins at the same address.
    for (; ended < count && end[byEnd[ended]] <= event; ended++) {
      const i = byEnd[ended];
      if (begin[i] < end[i]) gaps.removeBlock(address[i]);
    }
    for (; changed < segments.length && segments[changed].event <= event; changed++) gaps.changeSegment(segments[changed], arrays);
    for (; begun < count && begin[begun] <= event; begun++) {
      if (begin[begun] < end[begun]) gaps.addBlock(address[begun], address[begun] + size[begun]);
    }
    largest[event + 1] = gaps.largest;
    if ((event + 1) % EVENTS_PER_CHECK === 0) yield;
  }
}

/** Return the begins and ends of segments in the order of their events; ends come before begins. */
function segmentChanges({ segment_begin: begins, segment_end: ends }) {
  const changes = [];
  for (let segment = 0; segment < begins.length; segment++) {
    if (begins[segment] - 1 >= ends[segment]) continue;
    changes.push({ event: begins[segment] - 1, segment, begins: true }, { event: ends[segment], segment, begins: false });
  }
  return changes.sort((a, b) => a.event - b.event || a.begins - b.begins);
}

/**
 * The free memory between blocks, at one moment.
 *
 * A gap extends from the end of a block, or from the start of a segment, to the next block or to the end of the
 * segment. Leaf r of the tree is the gap after the r-th address at which a block or a segment can begin or end; it
 * is -1 if none does at this moment. An inner node is the maximum of its two children.
 */
class Gaps {
  constructor(addressLists) {
    this.addresses = distinctSorted(addressLists);
    this.leaves = 1;
    while (this.leaves < this.addresses.length) this.leaves *= 2;
    this.tree = new Float64Array(2 * this.leaves).fill(-1);
    this.blockEnd = new Float64Array(this.addresses.length).fill(-1);
    this.starting = new Int32Array(this.addresses.length).fill(-1); // segment that starts at the address
    this.ending = new Int32Array(this.addresses.length).fill(-1); // segment that ends at the address
  }

  get largest() {
    return Math.max(0, this.tree[1]);
  }

  addBlock(start, end) {
    const rank = this.#rank(start);
    this.blockEnd[rank] = end;
    this.#update(rank);
  }

  removeBlock(start) {
    const rank = this.#rank(start);
    this.blockEnd[rank] = -1;
    this.#update(rank);
  }

  /** Begin or end a segment. Adjacent ranges of one expandable segment are joined: they have no border. */
  changeSegment({ segment, begins }, arrays) {
    this.arrays = arrays;
    const start = this.#rank(arrays.segment_address[segment]);
    const end = this.#rank(arrays.segment_address[segment] + arrays.segment_size[segment]);
    if (begins || this.starting[start] === segment) this.starting[start] = begins ? segment : -1;
    if (begins || this.ending[end] === segment) this.ending[end] = begins ? segment : -1;
    this.#update(end);
    this.#update(start);
  }

  #update(rank) {
    const [ending, starting] = [this.ending[rank], this.starting[rank]];
    const hasBlock = this.blockEnd[rank] >= 0;
    const isJoined = ending >= 0 && starting >= 0 && continues(this.arrays, ending, starting);
    const isBorder = (ending >= 0 || starting >= 0) && !isJoined;
    if (hasBlock || isBorder) {
      // A leaf that is present counts as present while its gap is computed.
      this.#set(rank, 0);
      this.#set(rank, this.#gap(rank));
    } else this.#set(rank, -1);
    const previous = this.#previous(rank);
    if (previous >= 0) this.#set(previous, this.#gap(previous));
  }

  /** Return the free bytes after an address at which a block is, or at which a segment begins or ends. */
  #gap(rank) {
    if (this.ending[rank] >= 0 && this.starting[rank] < 0) return 0; // the address after a segment
    const next = this.#next(rank);
    if (next < 0) return 0;
    const start = this.blockEnd[rank] >= 0 ? this.blockEnd[rank] : this.addresses[rank];
    return Math.max(0, this.addresses[next] - start);
  }

  #rank(address) {
    let low = 0;
    let high = this.addresses.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.addresses[middle] < address) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #set(rank, gap) {
    const { tree } = this;
    let node = this.leaves + rank;
    tree[node] = gap;
    for (node >>= 1; node; node >>= 1) {
      const highest = Math.max(tree[2 * node], tree[2 * node + 1]);
      if (tree[node] === highest) break;
      tree[node] = highest;
    }
  }

  /** Return the next rank that is present, or -1. */
  #next(rank) {
    const { tree, leaves } = this;
    let node = leaves + rank;
    while (node > 1 && (node & 1 || tree[node + 1] < 0)) node >>= 1;
    if (node <= 1) return -1;
    for (node++; node < leaves; ) node = tree[2 * node] >= 0 ? 2 * node : 2 * node + 1;
    return node - leaves;
  }

  /** Return the previous rank that is present, or -1. */
  #previous(rank) {
    const { tree, leaves } = this;
    let node = leaves + rank;
    while (node > 1 && (!(node & 1) || tree[node - 1] < 0)) node >>= 1;
    if (node <= 1) return -1;
    for (node--; node < leaves; ) node = tree[2 * node + 1] >= 0 ? 2 * node + 1 : 2 * node;
    return node - leaves;
  }
}

/** Return whether a mapped range continues the range that ends at its start, as part of one expandable segment. */
export function continues(arrays, before, after) {
  const { segment_expandable: expandable, segment_stream: stream, segment_pool: pool, segment_kind: kind } = arrays;
  const agree = (values, unknown) => values[before] === values[after] || values[before] === unknown || values[after] === unknown;
  return Boolean(expandable[before] && expandable[after]) && stream[before] === stream[after] && agree(pool, UNKNOWN_POOL) && agree(kind, UNKNOWN_KIND);
}

// Values of page.py for a pool and a kind of segment that the snapshot does not record.
const UNKNOWN_POOL = -1;
const UNKNOWN_KIND = 2;

function distinctSorted(lists) {
  const all = new Float64Array(lists.reduce((sum, list) => sum + list.length, 0));
  let filled = 0;
  for (const list of lists) {
    all.set(list, filled);
    filled += list.length;
  }
  all.sort();
  return all.filter((address, i) => i === 0 || address !== all[i - 1]);
}
