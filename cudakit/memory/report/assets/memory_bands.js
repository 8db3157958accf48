// Summaries of the memory over time, from which the views draw a million events in a few milliseconds.

// Number of events in one bucket: drawings of long traces use one summary per bucket.
const BUCKET = 64;

/**
 * The memory of the largest groups at every event, for stacked bands.
 *
 * bandOf[i] is the band of allocation i; the last band has all other groups. An allocation that a filter
 * excludes has band -1. The summary of a bucket is the state at the event with the most memory in it.
 */
export class Bands {
  constructor(model, grouping, mask, limit) {
    this.model = model;
    this.names = [];
    this.bandOf = this.#assign(grouping, mask, limit);
    this.buckets = Math.ceil((model.events + 1) / BUCKET);
    const width = this.names.length;
    this.starts = new Float64Array(this.buckets * width);
    this.highest = new Float64Array(this.buckets * width);
    this.totals = new Float64Array(this.buckets);
    this.#summarize();
  }

  #assign(grouping, mask, limit) {
    const { model } = this;
    const largest = model.groupsAt(model.facts.peak_event, grouping, mask).slice(0, limit);
    const band = new Map(largest.map((group, i) => [group.id, i]));
    this.ids = largest.map((group) => group.id);
    this.names = grouping.names ? grouping.names(this.ids) : this.ids.map(grouping.name);
    this.names.push("all others");
    const bands = new Int8Array(model.count);
    for (let i = 0; i < bands.length; i++) {
      const excluded = mask && !mask[model.arrays.stack[i]];
      bands[i] = excluded ? -1 : (band.get(grouping.ids[i]) ?? largest.length);
    }
    return bands;
  }

  #summarize() {
    const width = this.names.length;
    const state = new BandState(this, -1, new Float64Array(width));
    for (let bucket = 0; bucket < this.buckets; bucket++) {
      const first = bucket * BUCKET - 1;
      state.advanceTo(first);
      this.starts.set(state.values, bucket * width);
      const last = Math.min(first + BUCKET - 1, this.model.events - 1);
      this.totals[bucket] = state.copyHighest(first, last, this.highest, bucket * width);
    }
  }

  /** Return the number of allocations whose end is at or before an event. */
  endedUntil(event) {
    const { byEnd, end, count } = this.model;
    let low = 0;
    let high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[byEnd[middle]] <= event) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * Return the bytes of each band for each column of an axis; see Axis.columns(). The value of a column is the state
   * at its event with the most memory. Item column * (number of bands) + band of the array.
   */
  sample({ from, to }) {
    const width = this.names.length;
    const samples = new Float64Array(from.length * width);
    let state = null;
    for (let column = 0; column < from.length; column++) {
      const inner = innerBuckets(from[column], to[column]);
      let highest = -1;
      for (let bucket = inner.first; bucket <= inner.last; bucket++) {
        if (this.totals[bucket] <= highest) continue;
        highest = this.totals[bucket];
        samples.set(this.highest.subarray(bucket * width, (bucket + 1) * width), column * width);
      }
      for (const [first, last] of inner.edges) {
        // The bucket of the edge has more events than the edge: its total is an upper bound.
        if (first > last || this.totals[bucketOf(first)] <= highest) continue;
        // Going on from the last column is faster than starting again, unless events were skipped.
        if (!state || state.event > first || state.event < first - BUCKET) state = this.#stateBefore(first);
        highest = state.copyHighest(first, last, samples, column * width, highest);
      }
    }
    return samples;
  }

  /** Return the state at the start of the bucket of an event. */
  #stateBefore(event) {
    const width = this.names.length;
    const bucket = bucketOf(event);
    return new BandState(this, bucket * BUCKET - 1, this.starts.slice(bucket * width, (bucket + 1) * width));
  }
}

/** The bytes of each band after one event; the state can only advance to later events. */
class BandState {
  constructor(bands, event, values) {
    const { model } = bands;
    this.event = event;
    this.values = values;
    this.total = values.reduce((sum, value) => sum + value, 0);
    this.bandOf = bands.bandOf;
    this.model = model;
    this.begun = event < 0 ? 0 : model.begunUntil(event);
    this.ended = bands.endedUntil(event);
  }

  /** Change the values to the state after an event. */
  advanceTo(event) {
    this.event = event;
    const { begin, end, byEnd, size, count } = this.model;
    const { bandOf } = this;
    for (; this.begun < count && begin[this.begun] <= event; this.begun++) this.#change(bandOf[this.begun], size[this.begun]);
    for (; this.ended < count && end[byEnd[this.ended]] <= event; this.ended++) {
      const index = byEnd[this.ended];
      this.#change(bandOf[index], -size[index]);
    }
  }

  #change(band, bytes) {
    if (band < 0) return;
    this.values[band] += bytes;
    this.total += bytes;
  }

  /**
   * Copy the values at the event with the most memory, of the events from first to last, if their sum is above
   * `highest`. Return the higher sum.
   */
  copyHighest(first, last, target, offset, highest = -1) {
    for (let event = first; event <= last; event++) {
      this.advanceTo(event);
      if (this.total > highest) {
        highest = this.total;
        target.set(this.values, offset);
      }
    }
    return highest;
  }
}

function bucketOf(event) {
  return Math.floor((event + 1) / BUCKET);
}

/** Return the buckets that only have events from first to last, and the ranges of the events before and after them. */
function innerBuckets(first, last) {
  const begin = Math.ceil((first + 1) / BUCKET);
  const end = Math.floor((last + 2) / BUCKET); // the bucket after the last one
  if (begin >= end) return { first: 0, last: -1, edges: [[first, Math.min(last, end * BUCKET - 2)], [Math.max(first, end * BUCKET - 1), last]] };
  return { first: begin, last: end - 1, edges: [[first, begin * BUCKET - 2], [end * BUCKET - 1, last]] };
}

/** Samples a curve for drawing; item e + 1 of the curve is the state after event e. */
export class CurveSampler {
  constructor(curve) {
    this.curve = curve;
    this.highest = new Float64Array(Math.ceil(curve.length / BUCKET));
    for (let i = 0; i < curve.length; i++) {
      const bucket = Math.floor(i / BUCKET);
      if (curve[i] > this.highest[bucket]) this.highest[bucket] = curve[i];
    }
  }

  /** Return the highest value in each column of an axis; see Axis.columns(). */
  sample({ from, to }) {
    const samples = new Float64Array(from.length);
    for (let column = 0; column < from.length; column++) {
      const inner = innerBuckets(from[column], to[column]);
      let highest = 0;
      for (let bucket = inner.first; bucket <= inner.last; bucket++) highest = Math.max(highest, this.highest[bucket]);
      for (const [first, last] of inner.edges) {
        if (first > last || this.highest[bucketOf(first)] <= highest) continue;
        for (let event = first; event <= last; event++) highest = Math.max(highest, this.curve[event + 1]);
      }
      samples[column] = highest;
    }
    return samples;
  }
}
