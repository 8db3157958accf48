// Flame graphs: the width of a box is the amount of its node, and a call is below its caller.

import { Surface, fitted, formatBytes, formatShare } from "./canvas.js";

const ROW = 19; // height of a row in pixels
const MOST_ROWS = 60;
const NARROWEST = 0.5; // width of the narrowest drawn box in pixels

/** Return a frame as text: "train.py:12 forward". */
export function frameText([name, file, line]) {
  const shortPath = file.split("/").slice(-2).join("/");
  if (!shortPath) return name;
  return line ? `${shortPath}:${line} ${name}` : `${shortPath} ${name}`;
}

/** A call tree as arrays. Node 0 is the root, and a node's number is higher than its parent's. */
export class CallTree {
  constructor(parent, frame, frames) {
    this.parent = parent;
    this.frame = frame;
    this.frames = frames;
    this.texts = frames.map(frameText);
    this.starts = new Uint32Array(parent.length + 1);
    for (let node = 1; node < parent.length; node++) this.starts[parent[node] + 1]++;
    for (let i = 1; i < this.starts.length; i++) this.starts[i] += this.starts[i - 1];
    const next = this.starts.slice();
    this.nodes = new Uint32Array(Math.max(parent.length - 1, 0));
    for (let node = 1; node < parent.length; node++) this.nodes[next[parent[node]]++] = node;
  }

  /** Return the children of a node that have a positive total, the largest total first. */
  children(node, total) {
    const children = this.nodes.subarray(this.starts[node], this.starts[node + 1]);
    return Array.from(children).filter((child) => total[child] > 0).sort((a, b) => total[b] - total[a]);
  }

  /** Return the total of each node: the self amounts of the node and its descendants. */
  totals(selfAmounts) {
    const total = Float64Array.from(selfAmounts);
    for (let node = total.length - 1; node > 0; node--) total[this.parent[node]] += total[node];
    return total;
  }

  /** Return the frame ids from a node to the root, innermost first. */
  path(node) {
    const frames = [];
    for (; node; node = this.parent[node]) frames.push(this.frame[node]);
    return frames;
  }
}

/**
 * A flame graph of a call tree. colorOf(node, colors) returns the color of a box; describe(node) returns lines for its
 * tooltip; format(amount) returns an amount as text; `subject` names the amounts. The graph is at least `fewestRows`
 * rows high.
 */
export class FlameGraph {
  constructor(tree, tooltip, { colorOf = null, describe = () => [], format = formatBytes, subject = "memory", fewestRows = 8 } = {}) {
    this.format = format;
    this.subject = subject;
    this.tree = tree;
    this.tooltip = tooltip;
    this.describe = describe;
    this.fewestRows = fewestRows;
    this.colorOf = colorOf || ((node, colors) => colors.bands[hashOf(tree.texts[tree.frame[node]]) % colors.bands.length]);
    this.root = 0;
    this.boxes = [];
    this.surface = new Surface(8 * ROW, "Flame graph", (...parts) => this.#draw(...parts));
    this.element = this.surface.element;
    const { canvas } = this.surface;
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => tooltip.hide());
  }

  /** Draw the self amounts of the nodes and their totals. */
  show(selfAmounts) {
    this.selfAmounts = selfAmounts;
    this.total = this.tree.totals(selfAmounts);
    if (!this.total[this.root]) this.root = 0;
    this.redraw();
  }

  redraw() {
    this.boxes = [];
    if (this.total[this.root]) this.#place(this.root, 0, 0, this.element.clientWidth || 800);
    this.surface.height = Math.max(this.fewestRows, ...this.boxes.map((box) => box.top / ROW + 1)) * ROW;
    this.surface.redraw();
  }

  /** Add the boxes of a node and of its descendants that are wide enough to see. */
  #place(node, depth, left, width) {
    this.boxes.push({ node, left, top: depth * ROW, width });
    if (depth + 1 >= MOST_ROWS) return;
    const perUnit = width / this.total[node];
    let x = left;
    for (const child of this.tree.children(node, this.total)) {
      const childWidth = this.total[child] * perUnit;
      if (childWidth < NARROWEST) break;
      this.#place(child, depth + 1, x, childWidth);
      x += childWidth;
    }
  }

  #draw(context, width, height, colors) {
    if (!this.selfAmounts) return;
    // If the width of the page has changed, all boxes are placed again.
    if (this.boxes.length && Math.abs(this.boxes[0].width - width) > 0.5) return this.redraw();
    context.textBaseline = "middle";
    context.textAlign = "left";
    if (!this.boxes.length) {
      context.fillStyle = colors.muted;
      context.fillText(`No ${this.subject}.`, 8, 20);
    }
    for (const box of this.boxes) this.#drawBox(context, box, colors);
  }

  #drawBox(context, { node, left, top, width }, colors) {
    const text = node ? this.tree.texts[this.tree.frame[node]] : this.#rootText();
    context.fillStyle = node ? this.colorOf(node, colors) : colors.line;
    context.globalAlpha = 0.55;
    context.fillRect(left, top, Math.max(width - 1, 0.5), ROW - 1);
    context.globalAlpha = 1;
    context.fillStyle = colors.ink;
    if (width > 24) context.fillText(fitted(context, text, width - 8), left + 4, top + ROW / 2);
  }

  #rootText() {
    const withoutStack = this.selfAmounts[0];
    return `all ${this.subject}${withoutStack ? `, ${this.format(withoutStack)} of it without a call stack` : ""}`;
  }

  #boxAt(event) {
    const [x, y] = this.surface.position(event);
    return this.boxes.find((box) => box.left <= x && x < box.left + box.width && box.top <= y && y < box.top + ROW);
  }

  #click(event) {
    const box = this.#boxAt(event);
    if (!box) return;
    this.root = box.node === this.root ? this.tree.parent[this.root] : box.node;
    this.redraw();
  }

  #hover(event) {
    const box = this.#boxAt(event);
    if (!box) return this.tooltip.hide();
    const { node } = box;
    const [name, file, line] = node ? this.tree.frames[this.tree.frame[node]] : [`all ${this.subject}`, "", 0];
    const amounts = `total ${this.format(this.total[node])} (${formatShare(this.total[node] / this.total[0])}) · self ${this.format(this.selfAmounts[node])}`;
    const fileText = file ? [line ? `${file}:${line}` : file] : [];
    this.tooltip.show(event, [name, ...fileText, amounts, ...this.describe(node)]);
  }
}

function hashOf(text) {
  let hash = 0;
  for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) >>> 0;
  return hash;
}
