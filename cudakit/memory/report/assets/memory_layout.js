// The segments at the cursor: a bar for each segment, with blocks in the colors of their groups.

import { Surface, formatBytes, formatCount } from "./canvas.js";
import { continues } from "./memory_free.js";

// Heights of a row and of its bar, and the width of the labels, in pixels.
const ROW = 22;
const BAR = 16;
const LABEL = 150;

export class LayoutView {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(420, "Segments at the cursor", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    this.scroll = 0;
    this.rows = [];
    const { canvas } = this.surface;
    canvas.addEventListener("wheel", (event) => this.#scroll(event), { passive: false });
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => app.tooltip.hide());
    canvas.addEventListener("click", (event) => app.pick(this.#itemAt(...this.surface.position(event)).allocation));
  }

  redraw() {
    const event = this.app.state.get("cursor");
    if (this.drawnEvent !== event) this.rows = this.#rowsAt(event);
    this.drawnEvent = event;
    this.surface.redraw();
  }

  /** Return the segments after an event with their allocations, the largest segment first. */
  #rowsAt(event) {
    const { model } = this.app;
    const { segment_address: address, segment_size: size } = model.arrays;
    const rows = model.segmentsAt(event).map((segment) => ({ segment, low: address[segment], size: size[segment], blocks: [], used: 0 }));
    const joined = joinAdjacent(rows, model.arrays);
    model.forEachLive(event, (i) => {
      const row = rowOf(joined, model.address[i]);
      if (!row) return;
      row.blocks.push(i);
      row.used += model.size[i];
    });
    return joined.sort((a, b) => b.size - a.size || a.low - b.low);
  }

  #scroll(event) {
    const bottom = Math.max(0, this.rows.length * ROW - this.surface.height);
    const next = Math.max(0, Math.min(bottom, this.scroll + event.deltaY));
    if (next !== this.scroll) event.preventDefault();
    this.scroll = next;
    this.surface.redraw();
  }

  #draw(context, width, height, colors) {
    const { app } = this;
    const largest = this.rows.length ? this.rows[0].size : 1;
    this.perByte = (width - LABEL - 8) / largest;
    const count = app.bands.names.length;
    const picked = app.pickedBand();
    context.textBaseline = "middle";
    this.rows.forEach((row, index) => {
      const top = index * ROW - this.scroll + 2;
      if (top < -ROW || top > height) return;
      context.fillStyle = colors.muted;
      context.textAlign = "right";
      context.fillText(`${formatBytes(row.size)}, ${Math.round((row.used / row.size) * 100)}% in use`, LABEL - 8, top + BAR / 2);
      context.fillStyle = colors.reserved;
      context.fillRect(LABEL, top, Math.max(row.size * this.perByte, 1), BAR);
      for (const i of row.blocks) {
        const band = app.bands.bandOf[i];
        if (band < 0) continue;
        context.globalAlpha = picked === null || picked === band ? 1 : 0.25;
        context.fillStyle = band === count - 1 ? colors.rest : colors.bands[band % colors.bands.length];
        const x = LABEL + (app.model.address[i] - row.low) * this.perByte;
        const blockWidth = app.model.size[i] * this.perByte;
        context.fillRect(x, top, Math.max(blockWidth - (blockWidth > 3 ? 1 : 0), 0.7), BAR);
        if (i === app.state.get("allocation")) {
          context.globalAlpha = 1;
          context.strokeStyle = colors.ink;
          context.lineWidth = 2;
          context.strokeRect(x, top, Math.max(blockWidth, 2), BAR);
        }
      }
      context.globalAlpha = 1;
    });
    if (!this.rows.length) {
      context.fillStyle = colors.muted;
      context.textAlign = "left";
      context.fillText("No segment was reserved at this event.", 8, 20);
    }
  }

  /** Return the row and the allocation at a position; the allocation is -1 if there is none. */
  #itemAt(x, y) {
    const row = this.rows[Math.floor((y + this.scroll) / ROW)];
    if (!row || x < LABEL) return { row, allocation: -1 };
    const address = row.low + (x - LABEL) / this.perByte;
    const { model } = this.app;
    const allocation = row.blocks.find((i) => model.address[i] <= address && address < model.address[i] + model.size[i]);
    return { row, allocation: allocation ?? -1 };
  }

  #hover(event) {
    const { row, allocation } = this.#itemAt(...this.surface.position(event));
    if (!row) return this.app.tooltip.hide();
    const { arrays, facts } = this.app.model;
    const pool = facts.pools[Math.max(arrays.segment_pool[row.segment], 0)];
    const segmentText = `segment 0x${row.low.toString(16)} · ${formatBytes(row.size)} · ${formatCount(row.blocks.length)} ${row.blocks.length === 1 ? "block" : "blocks"} · pool ${pool}`;
    this.app.tooltip.show(event, allocation < 0 ? [segmentText] : [segmentText, ...this.app.describe(allocation)]);
  }
}

/** Join adjacent mapped ranges of an expandable segment; rows are sorted by address. */
function joinAdjacent(rows, arrays) {
  const joined = [];
  let last = -1; // the segment of the last row
  for (const row of rows) {
    const previous = joined.at(-1);
    const isAdjacent = previous && previous.low + previous.size === row.low;
    if (isAdjacent && continues(arrays, last, row.segment)) previous.size += row.size;
    else joined.push(row);
    last = row.segment;
  }
  return joined;
}

/** Return the row that contains an address, or null; rows are sorted by address. */
function rowOf(rows, address) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].low <= address) low = middle + 1;
    else high = middle;
  }
  const row = rows[low - 1];
  return row && address < row.low + row.size ? row : null;
}
