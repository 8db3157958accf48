// The address map: time on the x axis, addresses on the y axis, and a rectangle for each allocation.
// Free memory in segments has its own color.

import { Surface, formatBytes, pixelOf } from "./canvas.js";
import { AddressSpace } from "./memory_addresses.js";
import { TimeScale, addTimeGestures } from "./memory_gestures.js";

const HEIGHT = Math.round(Math.min(Math.max(420, innerHeight * 0.35), 900)); // in pixels

export class MapView {
  constructor(app) {
    this.app = app;
    this.scale = new TimeScale(app);
    this.space = new AddressSpace(app.model);
    this.positions = Float64Array.from(app.model.address, (address) => this.space.position(address));
    this.surface = new Surface(HEIGHT, "Addresses over time", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    addTimeGestures(app, this.surface, this.scale, {
      selectsWindow: false,
      onClick: (event, x, y) => app.pick(this.#allocationAt(event, y), event),
      onMove: (event, x, y) => this.#hover(event, x, y),
    });
  }

  redraw() {
    this.surface.redraw();
  }

  #draw(context, width, height, colors) {
    const { left, right } = this.scale;
    const scale = this.surface.scale;
    const columns = Math.max(1, Math.round((width - left - right) * scale));
    const rows = Math.round(height * scale);
    // If only the cursor has moved, the pixels of the last drawing are used again.
    const key = JSON.stringify([columns, rows, this.app.axis.kind, this.app.visibleRange(), this.app.state.get("group"), colors.ink]);
    if (key !== this.key || this.bands !== this.app.bands) this.image = this.#createImage(context, columns, rows, colors);
    this.key = key;
    this.bands = this.app.bands;
    context.putImageData(this.image, Math.round(left * scale), 0);
    context.fillStyle = colors.muted;
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillText("addresses of", left - 8, 2);
    context.fillText(formatBytes(this.space.total), left - 8, 16);
    this.#drawCursor(context, width, height, colors);
  }

  /** Return an image of the map without the cursor. */
  #createImage(context, columns, rows, colors) {
    const image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    const { axis } = this.app;
    const [first, last] = this.app.visibleRange();
    this.firstEvent = axis.eventAt(first);
    this.lastEvent = axis.eventAt(last);
    // Multiplying is fastest if the axis counts events; times need a table.
    this.first = first;
    this.perEvent = columns / (last - first);
    this.columnOf = axis.kind === "event" ? null : this.#columnTable(columns);
    if (this.rows !== rows) this.#placeRows(rows);
    const { model, bands } = this.app;
    const inFirstBand = new Int8Array(this.segments.begin.length);
    this.#fill(pixels, columns, this.segments, inFirstBand.length, inFirstBand, [pixelOf(context, colors.reserved)]);
    this.#fill(pixels, columns, this.allocations, model.begunUntil(this.lastEvent), bands.bandOf, this.#colors(context, colors));
    return image;
  }

  #colors(context, colors) {
    const count = this.app.bands.names.length;
    const picked = this.app.pickedBand();
    const dim = pixelOf(context, colors.line);
    return Uint32Array.from({ length: count }, (_, band) => {
      if (picked !== null && picked !== band) return dim;
      return pixelOf(context, band === count - 1 ? colors.rest : colors.bands[band % colors.bands.length]);
    });
  }

  /** Compute the pixel rows of all segments and allocations for a height of the map. */
  #placeRows(rows) {
    const { model } = this.app;
    const { segment_begin: begins, segment_end: end, segment_address: address, segment_size: size } = model.arrays;
    const begin = Int32Array.from(begins, (event) => event - 1);
    this.rows = rows;
    this.segments = { begin, end, ...this.#rowsOf(address, size, rows) };
    this.allocations = { begin: model.begin, end: model.end, ...this.#rowsOf(model.address, model.size, rows) };
  }

  /** Return the first pixel row of each range of addresses, and the row after its last row. */
  #rowsOf(address, size, rows) {
    const perByte = rows / Math.max(this.space.total, 1);
    const top = new Int32Array(address.length);
    const bottom = new Int32Array(address.length);
    for (let i = 0; i < top.length; i++) {
      const low = this.space.position(address[i]);
      top[i] = Math.min(rows - 1, Math.max(0, Math.floor(low * perByte)));
      bottom[i] = Math.min(rows, Math.max(top[i] + 1, Math.floor((low + size[i]) * perByte)));
    }
    return { top, bottom };
  }

  /** Return the pixel column of each visible event; item 0 is that of `firstEvent`. */
  #columnTable(columns) {
    const { firstEvent, lastEvent } = this;
    const { axis } = this.app;
    const table = new Uint16Array(lastEvent - firstEvent + 1).fill(columns);
    const { to } = axis.columns(...this.app.visibleRange(), columns);
    let next = 0;
    for (let column = 0; column < columns; column++) {
      table.fill(column, next, to[column] - firstEvent + 1);
      next = to[column] - firstEvent + 1;
    }
    return table;
  }

  /** Fill the pixels of the first `count` items in the colors of their bands; items of band -1 are left out. */
  #fill(pixels, columns, { begin, end, top, bottom }, count, bandOf, colors) {
    // Local variables: this loop runs for a million items in each frame.
    const { first, perEvent, firstEvent, lastEvent, columnOf } = this;
    for (let i = 0; i < count; i++) {
      const band = bandOf[i];
      if (band < 0 || begin[i] > lastEvent || end[i] <= firstEvent) continue;
      const left = begin[i] <= firstEvent ? 0 : columnOf ? columnOf[begin[i] - firstEvent] : ((begin[i] - first) * perEvent) | 0;
      if (left >= columns) continue;
      const color = colors[band];
      const right = end[i] > lastEvent ? columns : Math.max(left + 1, columnOf ? columnOf[end[i] - firstEvent] : ((end[i] - first) * perEvent) | 0);
      const stop = bottom[i] * columns;
      for (let row = top[i] * columns; row < stop; row += columns) {
        for (let pixel = row + left; pixel < row + right; pixel++) pixels[pixel] = color;
      }
    }
  }

  #drawCursor(context, width, height, colors) {
    const x = this.scale.x(this.app.state.get("cursor"), width);
    if (this.scale.contains(x, width)) {
      context.strokeStyle = colors.accent;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    const picked = this.app.state.get("allocation");
    if (picked < 0) return;
    const { model } = this.app;
    const perByte = height / Math.max(this.space.total, 1);
    const left = Math.max(this.scale.x(model.begin[picked], width), this.scale.left);
    const right = Math.min(this.scale.x(Math.min(model.end[picked], model.events), width), width - this.scale.right);
    context.strokeStyle = colors.ink;
    context.strokeRect(left, this.positions[picked] * perByte, Math.max(right - left, 2), Math.max(model.size[picked] * perByte, 2));
  }

  /** Return the allocation at an event and a y coordinate in pixels, or -1. */
  #allocationAt(event, y) {
    const position = (y / this.surface.height) * this.space.total;
    let allocation = -1;
    this.app.model.forEachLive(event, (i) => {
      if (this.positions[i] <= position && position < this.positions[i] + this.app.model.size[i]) allocation = i;
    });
    return allocation;
  }

  #hover(event, x, y) {
    const pointedEvent = this.scale.event(x, this.surface.width);
    const allocation = this.#allocationAt(pointedEvent, y);
    const address = this.space.addressAt((y / this.surface.height) * this.space.total);
    const positionText = `${this.app.eventLabel(pointedEvent)} · address 0x${address.toString(16)}`;
    this.app.tooltip.show(event, allocation < 0 ? [positionText, "no allocation"] : [positionText, ...this.app.describe(allocation)]);
  }
}
