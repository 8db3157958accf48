// The chart of memory over time: stacked bands, curves, markers, ranges, the cursor and the selected window.

import { Surface, fitted, formatBytes, formatShare, pixelOf, ticks } from "./canvas.js";
import { CurveSampler } from "./memory_bands.js";
import { TimeScale, addTimeGestures } from "./memory_gestures.js";

// Heights in pixels: the space above the plot, the plot, the space between the plots, the plot of fragmentation, the
// x axis, and a lane. Large windows have a larger plot.
const TOP = 8;
const PLOT = Math.round(Math.min(Math.max(230, innerHeight * 0.19), 520));
const GAP = 16;
const SHARES = 44;
const AXIS = 22;
const LANE = 16;
const BOTTOM = TOP + PLOT + GAP + SHARES; // y coordinate of the x axis
const MOST_LANES = 6;
const CURVES = ["reserved", "active", "allocated", "requested"];

export class TimeView {
  constructor(app) {
    this.app = app;
    this.scale = new TimeScale(app);
    this.lanes = lanesOf(app.model);
    const height = BOTTOM + AXIS + this.lanes.length * LANE;
    this.surface = new Surface(height, "Memory over time", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    this.curves = Object.fromEntries(CURVES.map((name) => [name, new CurveSampler(app.model.curves[name])]));
    addTimeGestures(app, this.surface, this.scale, {
      selectsWindow: true,
      onClick: (event) => app.state.set({ cursor: event, brush: null }),
      onMove: (event, x, y) => this.#hover(event, x, y),
    });
  }

  redraw() {
    this.surface.redraw();
  }

  /** Draw the curves of the free memory from now on. */
  showFreeMemory({ share, fragmentation }) {
    this.shares = { share: new CurveSampler(share), fragmentation: new CurveSampler(fragmentation) };
    this.redraw();
  }

  #draw(context, width, height, colors) {
    const [first, last] = this.app.visibleRange();
    const count = Math.max(1, Math.floor(width - this.scale.left - this.scale.right));
    const columns = this.app.axis.columns(first, last, count);
    const reserved = this.curves.reserved.sample(columns);
    const bands = this.app.bands.sample(columns);
    this.top = Math.max(1, this.#highest(reserved, bands)) * 1.04;
    this.sampled = { bands, columns: count };
    this.#drawBands(context, bands, count, colors);
    this.#drawAxes(context, width, colors);
    for (const [name, dash] of [["reserved", []], ["allocated", [5, 3]], ["requested", [1, 3]]]) {
      const values = name === "reserved" ? reserved : this.curves[name].sample(columns);
      this.#drawCurve(context, values, (value) => this.#y(value), name === "reserved" ? colors.muted : colors.ink, dash);
    }
    this.#drawShares(context, columns, width, colors);
    this.#drawMarkers(context, width, colors);
    this.#drawLanes(context, width, colors);
    this.#drawCursor(context, width, height, colors);
  }

  /** Return the highest of the reserved bytes and the sums of the bands. */
  #highest(reserved, bands) {
    let highest = 0;
    for (const value of reserved) highest = Math.max(highest, value);
    const count = this.app.bands.names.length;
    for (let column = 0; column * count < bands.length; column++) {
      let total = 0;
      for (let band = 0; band < count; band++) total += bands[column * count + band];
      highest = Math.max(highest, total);
    }
    return highest;
  }

  #y(bytes) {
    return TOP + PLOT * (1 - bytes / this.top);
  }

  #drawAxes(context, width, colors) {
    const [first, last] = this.app.visibleRange();
    context.globalAlpha = 1;
    context.lineWidth = 1;
    context.strokeStyle = colors.line;
    context.fillStyle = colors.muted;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const drawTick = (text, atY) => {
      const y = Math.round(atY) + 0.5;
      context.beginPath();
      context.moveTo(this.scale.left, y);
      context.lineTo(width - this.scale.right, y);
      context.stroke();
      context.fillText(text, this.scale.left - 8, y);
    };
    for (const value of ticks(0, this.top, 5, 2)) drawTick(formatBytes(value), this.#y(value));
    for (const share of [0, 1]) drawTick(`${share * 100}%`, shareY(share));
    context.fillText("fragmentation", this.scale.left - 8, shareY(0.5));
    context.textAlign = "center";
    context.textBaseline = "top";
    const values = ticks(first, last, Math.max(2, width / 130), 10);
    const step = values.length > 1 ? values[1] - values[0] : last - first;
    for (const value of values) {
      const text = this.app.axis.tickText(value, step);
      // The last label ends at the edge of the chart.
      const rightmost = width - context.measureText(text).width / 2;
      context.fillText(text, Math.min(this.scale.xOf(value, width), rightmost), BOTTOM + 6);
    }
  }

  /** Draw the free share of the reserved memory as an area, and the external fragmentation as a line. */
  #drawShares(context, columns, width, colors) {
    context.fillStyle = colors.muted;
    context.textBaseline = "bottom";
    context.textAlign = "left";
    if (!this.shares) {
      context.fillText("computing the fragmentation…", this.scale.left + 4, shareY(0) - 4);
      return;
    }
    context.fillStyle = colors.reserved;
    context.beginPath();
    context.moveTo(this.scale.left, BOTTOM);
    const shares = this.shares.share.sample(columns);
    for (let column = 0; column < shares.length; column++) {
      context.lineTo(this.scale.left + column, shareY(shares[column]));
      context.lineTo(this.scale.left + column + 1, shareY(shares[column]));
    }
    context.lineTo(this.scale.left + shares.length, BOTTOM);
    context.fill();
    this.#drawCurve(context, this.shares.fragmentation.sample(columns), shareY, colors.error, []);
  }

  /** Draw the bands pixel by pixel, which is many times faster than drawing rectangles. */
  #drawBands(context, bands, columns, colors) {
    const scale = this.surface.scale;
    const pixelColumns = Math.round(columns * scale);
    const pixelRows = Math.round(PLOT * scale);
    const image = context.createImageData(pixelColumns, pixelRows);
    const pixels = new Uint32Array(image.data.buffer).fill(pixelOf(context, colors.surface));
    const count = this.app.bands.names.length;
    const picked = this.app.pickedBand();
    const dim = pixelOf(context, colors.line);
    const shades = Array.from({ length: count }, (_, band) => {
      if (picked !== null && picked !== band) return dim;
      return pixelOf(context, band === count - 1 ? colors.rest : colors.bands[band % colors.bands.length]);
    });
    for (let x = 0; x < pixelColumns; x++) {
      const column = Math.min(columns - 1, Math.floor(x / scale));
      let total = 0;
      let bottom = pixelRows;
      for (let band = 0; band < count; band++) {
        total += bands[column * count + band];
        const top = Math.max(0, Math.round(pixelRows * (1 - total / this.top)));
        for (let y = top; y < bottom; y++) pixels[y * pixelColumns + x] = shades[band];
        bottom = Math.min(bottom, top);
      }
    }
    context.putImageData(image, Math.round(this.scale.left * scale), Math.round(TOP * scale));
  }

  #drawCurve(context, values, yOf, color, dash) {
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.setLineDash(dash);
    context.beginPath();
    for (let column = 0; column < values.length; column++) {
      const y = yOf(values[column]);
      if (column) context.lineTo(this.scale.left + column, y);
      context.lineTo(this.scale.left + column + 1, y);
    }
    context.stroke();
    context.setLineDash([]);
  }

  #drawMarkers(context, width, colors) {
    const { oom_event: failures } = this.app.model.arrays;
    const labelPositions = []; // x coordinates of the labels, in pixels
    const drawMarker = (event, color, text) => {
      const x = this.scale.x(event, width);
      if (!this.scale.contains(x, width)) return;
      context.strokeStyle = context.fillStyle = color;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, BOTTOM);
      context.stroke();
      context.setLineDash([]);
      if (labelPositions.some((position) => Math.abs(position - x) < 100)) return;
      labelPositions.push(x);
      context.textAlign = x > width - 110 ? "right" : "left";
      context.textBaseline = "top";
      context.fillText(text, x + (x > width - 110 ? -4 : 4), TOP);
    };
    const markers = [
      ...Array.from(failures.slice(-20), (event) => ({ event, color: colors.error, text: "out of memory" })),
      ...this.app.model.facts.snapshots.slice(-20).map((event) => ({ event, color: colors.muted, text: "snapshot" })),
    ];
    for (const { event, color, text } of markers) drawMarker(event, color, text);
  }

  #drawLanes(context, width, colors) {
    context.textBaseline = "middle";
    context.textAlign = "left";
    this.lanes.forEach((lane, index) => {
      const top = BOTTOM + AXIS + index * LANE;
      let drawnUntil = -1;
      for (const { first, last, name } of lane) {
        const x = Math.max(this.scale.x(first, width), this.scale.left);
        const end = Math.min(this.scale.x(last, width), width - this.scale.right);
        if (end <= x || end < drawnUntil) continue;
        drawnUntil = Math.max(end, x + 1);
        context.fillStyle = colors.faint;
        context.fillRect(x, top, Math.max(end - x - 1, 1), LANE - 2);
        context.fillStyle = colors.muted;
        context.fillText(fitted(context, name, end - x - 6), x + 3, top + LANE / 2);
      }
    });
  }

  #drawCursor(context, width, height, colors) {
    const { state } = this.app;
    const drawLine = (event) => {
      const x = this.scale.x(event, width);
      if (!this.scale.contains(x, width)) return;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    };
    const brush = state.get("brush");
    if (brush) {
      const [from, to] = brush.map((event) => Math.min(Math.max(this.scale.x(event, width), this.scale.left), width - this.scale.right));
      context.fillStyle = colors.accent;
      context.globalAlpha = 0.16;
      context.fillRect(from, TOP, to - from, BOTTOM - TOP);
      context.globalAlpha = 1;
    }
    context.strokeStyle = colors.accent;
    context.lineWidth = 2;
    drawLine(state.get("cursor"));
  }

  #hover(event, x, y) {
    const { app } = this;
    const width = this.surface.width;
    const pointedEvent = this.scale.event(x, width);
    const totals = ["reserved", "active", "requested"].map((name) => `${name === "active" ? "in use" : name} ${formatBytes(app.model.curves[name][pointedEvent + 1])}`);
    const lines = [app.eventLabel(pointedEvent), totals.join(" · ")];
    const free = app.model.free.at(pointedEvent);
    if (free) lines.push(`free in segments ${formatBytes(free.free)} · largest free block ${formatBytes(free.largest)} · fragmentation ${formatShare(free.fragmentation)}`);
    const band = this.#bandAt(x, y);
    if (band !== null) lines.push(`${app.bands.names[band.band]}: ${formatBytes(band.bytes)}`);
    const lane = this.lanes[Math.floor((y - BOTTOM - AXIS) / LANE)];
    const range = lane?.find(({ first, last }) => first <= pointedEvent && pointedEvent < last);
    if (range) lines.push(`range ${range.name}`);
    app.tooltip.show(event, lines);
  }

  /** Return the band at a position and its bytes, or null. */
  #bandAt(x, y) {
    const column = Math.floor(x - this.scale.left);
    if (!this.sampled || column < 0 || column >= this.sampled.columns) return null;
    const count = this.app.bands.names.length;
    let total = 0;
    for (let band = 0; band < count; band++) {
      const bytes = this.sampled.bands[column * count + band];
      total += bytes;
      if (bytes > 0 && this.#y(total) <= y && y <= this.#y(total - bytes)) return { band, bytes };
    }
    return null;
  }
}

/** Return the y coordinate of a share, from 0 to 1. */
function shareY(share) {
  return BOTTOM - SHARES * share;
}

/** Return the annotations in lanes, one lane for each nesting depth; the outermost lane is first. */
function lanesOf(model) {
  const lanes = [];
  for (const [first, last, depth, name] of model.facts.ranges) {
    if (depth >= MOST_LANES) continue;
    while (lanes.length <= depth) lanes.push([]);
    lanes[depth].push({ first, last, name: model.facts.range_names[name] });
  }
  return lanes;
}
