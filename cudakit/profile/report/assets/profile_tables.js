// Tables of the selected window: GPU time by kernel and by line, every piece of work, and the flame graph.

import { VirtualList, formatBytes, formatCount, formatShare, make } from "./canvas.js";
import { FlameGraph } from "./flame.js";
import { firstAtLeast } from "./profile_model.js";
import { formatNanoseconds, formatTime } from "./profile_time.js";
import { shortName } from "./profile_timeline.js";

const ROW = 24; // height of a row in pixels
const COLUMNS = [
  ["time", "GPU time", ({ time }) => formatNanoseconds(time)],
  ["share", "share", ({ share }) => formatShare(share)],
  ["count", "calls", ({ count }) => formatCount(count)],
  ["mean", "mean", ({ mean }) => formatNanoseconds(mean)],
  ["name", "name", ({ name }) => name],
];

// The columns of the list of all work: the class of the style sheet with the width, and the heading.
const WORK_COLUMNS = [
  ["time", "start"],
  ["bytes", "duration"],
  ["change", "stream or size"],
  ["name", "name"],
];

/** The kernels or the lines with GPU time in the selected window, sortable by each column. */
export class GroupTable {
  constructor(app, kind) {
    this.app = app;
    this.kind = kind;
    this.sort = { column: "time", down: true };
    this.list = new VirtualList(396, ROW, (index) => this.#row(this.rows[index]));
    this.headings = COLUMNS.map(([column, text]) => make("button", { type: "button", class: cssClass(column), onclick: () => this.#sortBy(column) }, text));
    this.title = make("span", { class: "muted" });
    this.element = make("div", { class: "holders" }, make("div", { class: "view-bar" }, this.title), make("div", { class: "list-row list-head" }, ...this.headings), this.list.element);
  }

  redraw(changed) {
    if (changed && this.rows && !["window", "filter", "group", "by"].some((name) => changed.has(name))) return;
    const { model, mask } = this.app;
    const groups = model.groupsIn(...this.app.window(), model.grouping(this.kind), mask);
    const total = groups.reduce((sum, group) => sum + group.time, 0);
    this.rows = groups.map((group) => ({ ...group, share: total ? group.time / total : 0, mean: group.time / group.count }));
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    this.rows.sort((a, b) => sign * (a[column] < b[column] ? -1 : a[column] > b[column] ? 1 : 0));
    COLUMNS.forEach(([name, text], i) => (this.headings[i].textContent = name === column ? `${text} ${down ? "▾" : "▴"}` : text));
    this.title.textContent = `${formatNanoseconds(total)} of GPU time in ${this.app.windowText()}`;
    this.list.setLength(this.rows.length);
  }

  #sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : column !== "name" };
    this.rows = null;
    this.redraw(null);
  }

  #row(row) {
    const { app } = this;
    const isPicked = app.state.get("by") === this.kind && app.state.get("group") === row.id;
    const cells = COLUMNS.map(([column, , text]) => make("span", { class: cssClass(column) }, ...(column === "name" && app.state.get("by") === this.kind ? [app.swatch(row.id)] : []), column === "name" && this.kind === "kernel" ? shortName(row.name) : text(row)));
    const onclick = () => app.state.set({ by: this.kind, group: isPicked ? -1 : row.id });
    return make("div", { class: `list-row${isPicked ? " picked" : ""}`, title: row.name, onclick }, ...cells);
  }
}

/** Return the class of the style sheet with the width of a column. */
function cssClass(column) {
  return { time: "bytes", share: "share", count: "blocks", mean: "bytes", name: "name" }[column];
}

/** Every kernel, copy and memset of the selected window, in the order of their starts. */
export class WorkList {
  constructor(app) {
    this.app = app;
    this.list = new VirtualList(396, ROW, (row) => this.#row(row < this.listed.length ? this.listed[row] : this.next + row - this.listed.length));
    this.title = make("span", { class: "muted" });
    const headings = WORK_COLUMNS.map(([style, text]) => make("span", { class: `muted ${style}` }, text));
    this.element = make("div", { class: "events" }, make("div", { class: "view-bar" }, this.title), make("div", { class: "list-row list-head" }, ...headings), this.list.element);
  }

  redraw(changed) {
    if (!changed || !this.listed || ["window", "filter", "group", "by"].some((name) => changed.has(name))) this.#select();
    else if (!changed.has("pick")) return;
    const picked = this.app.picked();
    const row = picked?.source === "work" ? this.#rowOf(picked.index) : -1;
    if (row >= 0) this.list.scrollTo(row);
    else this.list.redraw();
  }

  #rowOf(i) {
    const row = i - this.next + this.listed.length;
    return row >= this.listed.length && row < this.list.length ? row : this.listed.indexOf(i);
  }

  /** Set the rows: the work in `listed`, and then consecutive work from index `next` on. */
  #select() {
    const { model, mask, grouping } = this.app;
    const { work } = model;
    const group = this.app.state.get("group");
    const [first, last] = this.app.window();
    const [from, to] = work.indicesIn(first, last);
    const begun = Math.min(firstAtLeast(work.start, first), to); // index of the first work that starts in the window
    const isFiltered = mask || group >= 0;
    this.listed = [];
    this.next = isFiltered ? to : begun;
    for (let i = from; i < this.next; i++) {
      const signature = work.signature[i];
      const isIn = i >= begun || work.end[i] > first;
      if (isIn && (!mask || mask[signature]) && (group < 0 || grouping.ids[signature] === group)) this.listed.push(i);
    }
    const count = this.listed.length + to - this.next;
    this.title.textContent = `${formatCount(count)} of ${formatCount(work.count)} kernels, copies and memsets; click one to show it`;
    this.list.setLength(count);
  }

  #row(i) {
    const { app } = this;
    const { work } = app.model;
    const picked = app.picked();
    const name = app.model.nameOfWork(i);
    return make(
      "div",
      { class: `list-row${picked?.source === "work" && picked.index === i ? " picked" : ""}`, title: name, onclick: () => app.pickAndShow("work", i) },
      make("span", { class: "time" }, formatTime(work.start[i])),
      make("span", { class: "bytes" }, formatNanoseconds(work.duration[i])),
      make("span", { class: "change" }, work.kind[i] ? formatBytes(work.size[i]) : `stream ${app.model.streamOfWork(i)}`),
      make("span", { class: "name" }, app.swatch(app.grouping.ids[work.signature[i]]), shortName(name)),
    );
  }
}

/** The flame graph of GPU time in the selected window: Python call stacks, and the kernels that they launched. */
export class FlameView {
  constructor(app) {
    this.app = app;
    this.graph = new FlameGraph(app.model.tree, app.tooltip, { format: formatNanoseconds, subject: "GPU time" });
    this.title = make("span", { class: "muted" });
    this.element = make("div", {}, make("div", { class: "view-bar" }, this.title), this.graph.element);
  }

  redraw(changed) {
    if (changed && this.graph.selfAmounts && !["window", "filter"].some((name) => changed.has(name))) return;
    this.graph.show(this.app.model.nodeTimes(...this.app.window(), this.app.mask));
    this.title.textContent = `${formatNanoseconds(this.graph.total[0])} of GPU time in ${this.app.windowText()}; click a frame to enlarge it, the top row to go back`;
  }
}
