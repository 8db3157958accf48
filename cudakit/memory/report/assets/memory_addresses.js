// The y axis of the address map: addresses without the gaps between segments.

/**
 * Addresses without the gaps between segments. The position of an address is the number of bytes below it
 * that were reserved at some time.
 */
export class AddressSpace {
  constructor(model) {
    const { segment_address: address, segment_size: size } = model.arrays;
    const order = Array.from(address, (_, i) => i).sort((a, b) => address[a] - address[b]);
    this.starts = [];
    this.positions = [];
    let end = -1;
    let position = 0;
    for (const i of order) {
      const from = Math.max(address[i], end);
      const to = address[i] + size[i];
      if (to <= from) continue;
      if (address[i] > end) {
        this.starts.push(address[i]);
        this.positions.push(position);
      }
      position += to - from;
      end = to;
    }
    this.total = position;
  }

  /** Return the position of an address. */
  position(address) {
    let low = 0;
    let high = this.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= address) low = middle + 1;
      else high = middle;
    }
    return low ? this.positions[low - 1] + address - this.starts[low - 1] : 0;
  }

  /** Return the address at a position. */
  addressAt(position) {
    let low = 0;
    let high = this.positions.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.positions[middle] <= position) low = middle + 1;
      else high = middle;
    }
    return low ? this.starts[low - 1] + position - this.positions[low - 1] : 0;
  }
}
