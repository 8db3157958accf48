// The profile page: loads the data, and lets all views share one window, one picked span and one filter.

import { BAND_COLORS, Tooltip, formatCount, make } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { PageState, choiceReader, numberReader, rangeReader } from "./page_state.js";
import { DetailsView } from "./profile_details.js";
import { ProfileModel } from "./profile_model.js";
import { FlameView, GroupTable, WorkList } from "./profile_tables.js";
import { formatNanoseconds } from "./profile_time.js";
import { Timeline, shortName } from "./profile_timeline.js";

const GROUPINGS = { kernel: "kernel", line: "line of code" };
const TABS = { flame: "Flame graph", kernels: "Kernels", lines: "Lines of code", work: "All work" };
const SHORTEST_VIEW = 20; // ns

class ProfileExplorer {
  constructor(model, element, prefix) {
    this.model = model;
    this.tooltip = new Tooltip();
    const last = model.duration;
    // The program's start can be much longer than its steps, which would then be too narrow to read.
    const opening = model.facts.measured_ns || [0, last];
    this.state = new PageState(
      { view: opening, window: null, by: "kernel", tab: "flame", group: -1, pick: "", filter: "" },
      {
        view: rangeReader(0, last),
        window: rangeReader(0, last),
        by: choiceReader(Object.keys(GROUPINGS)),
        tab: choiceReader(Object.keys(TABS)),
        group: numberReader(-1, 2 ** 31),
        pick: (text) => this.#readPick(text),
        filter: (text) => text.slice(0, 200),
      },
      prefix,
    );
    this.#updateGroups();
    this.timeline = new Timeline(this);
    this.views = { flame: new FlameView(this), kernels: new GroupTable(this, "kernel"), lines: new GroupTable(this, "line"), work: new WorkList(this) };
    this.details = new DetailsView(this);
    this.#build(element);
    this.state.listen((changed) => this.#update(changed));
    this.#update(null);
  }

  /** Return the text of a picked span, "work5" or "call7", if there is such a span. */
  #readPick(text) {
    const match = /^(work|call)(\d{1,9})$/.exec(text);
    const spans = match?.[1] === "work" ? this.model.work : this.model.calls;
    return match && Number(match[2]) < spans.count ? text : undefined;
  }

  #build(element) {
    const options = Object.entries(GROUPINGS).map(([value, text]) => make("option", { value }, text));
    this.by = make("select", { onchange: () => this.state.set({ by: this.by.value, group: -1 }) }, ...options);
    this.filter = make("input", { type: "search", placeholder: "kernel, function, file", oninput: () => this.state.set({ filter: this.filter.value.slice(0, 200), group: -1 }) });
    this.tabs = Object.entries(TABS).map(([tab, text]) => make("button", { type: "button", role: "tab", id: `tab-${tab}`, onclick: () => this.state.set({ tab }) }, text));
    this.legend = make("ul", { class: "legend" });
    this.body = make("div", { class: "view", role: "tabpanel" });
    const zoomToWindow = () => this.state.get("window") && this.show(this.window()[0], this.window()[1] - this.window()[0]);
    element.replaceChildren(
      make(
        "div",
        { class: "toolbar" },
        make("label", {}, "color by ", this.by),
        make("label", {}, "only work with ", this.filter),
        make("button", { type: "button", onclick: () => this.showAll() }, "show all"),
        make("button", { type: "button", onclick: zoomToWindow }, "zoom to the window"),
        make("span", { class: "muted" }, "wheel: zoom · drag: select a window · shift and drag: move · click: details"),
      ),
      make(
        "div",
        { class: "panes" },
        make("div", {}, this.timeline.element, this.legend, make("div", { class: "tabs", role: "tablist" }, ...this.tabs), this.body),
        this.details.element,
      ),
      make("p", { class: "caption" }, this.#caption()),
      make("p", { class: "caption" }, "Keys: ← → move the view, with Shift by more; + − zoom; 0 shows all; Z zooms to the window; [ ] go to the previous and the next kernel or call; Esc ends the selection and the filter."),
      this.tooltip.element,
    );
    element.addEventListener("keydown", (event) => this.#key(event, zoomToWindow));
  }

  #caption() {
    const { work, calls, facts, duration } = this.model;
    const hidden = work.row.some((row) => !row) ? " Streams with little work are not drawn; sums count them." : "";
    const simulated = facts.simulated ? " Simulated device." : "";
    return `${formatCount(work.count)} kernels, copies and memsets and ${formatCount(calls.count)} API calls in ${formatNanoseconds(duration)}. Where one pixel stands for many kernels or calls, the height of its bar is the share of time that they cover.${hidden}${simulated}`;
  }

  /** Compute the groups, their colors and the mask after a change of the filter or the grouping. */
  #updateGroups() {
    this.mask = this.model.signaturesWith(this.state.get("filter"));
    this.grouping = this.model.grouping(this.state.get("by"));
    const groups = this.model.groupsIn(-1, this.model.duration + 1, this.grouping, null);
    this.topGroups = groups.slice(0, BAND_COLORS);
    this.bands = new Map(this.topGroups.map(({ id }, band) => [id, band]));
  }

  /** Return the number of the color of a group; BAND_COLORS is the color of all small groups. */
  bandOf(id) {
    return this.bands.get(id) ?? BAND_COLORS;
  }

  colorOfWork(i, colors) {
    const band = this.bandOf(this.grouping.ids[this.model.work.signature[i]]);
    return band < BAND_COLORS ? colors.bands[band] : colors.rest;
  }

  swatch(id) {
    const band = this.bandOf(id);
    return make("span", { class: `swatch band${band < BAND_COLORS ? band : "-rest"}` });
  }

  /** Draw the changed views now, instead of before the next frame. */
  redraw() {
    this.state.notify();
  }

  /** Redraw after changes of the state. `changed` has the names of changed values; null means all values. */
  #update(changed) {
    if (!changed || changed.has("filter") || changed.has("by")) {
      this.#updateGroups();
      this.by.value = this.state.get("by");
      if (this.filter.value !== this.state.get("filter")) this.filter.value = this.state.get("filter");
      this.legend.replaceChildren(...this.topGroups.map((group) => this.#legendItem(group)), make("li", {}, make("span", { class: "swatch band-rest" }), "other"));
    }
    const tab = this.state.get("tab");
    const view = this.views[tab];
    if (!changed || changed.has("tab")) {
      this.body.replaceChildren(view.element);
      for (const button of this.tabs) button.setAttribute("aria-selected", String(button.id === `tab-${tab}`));
      view.redraw(null);
    } else view.redraw(changed);
    this.timeline.redraw();
    this.details.redraw(changed);
  }

  #legendItem({ id, name }) {
    const text = this.state.get("by") === "kernel" ? shortName(name) : name;
    const isPicked = this.state.get("group") === id;
    return make("li", { title: name, class: isPicked ? "picked" : undefined, onclick: () => this.state.set({ group: this.state.get("group") === id ? -1 : id }) }, this.swatch(id), text);
  }

  #key(event, zoomToWindow) {
    if (event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey) return;
    const [first, last] = this.state.get("view");
    const center = (first + last) / 2;
    const share = event.shiftKey ? 0.8 : 0.1;
    const actions = {
      ArrowLeft: () => this.pan(-share),
      ArrowRight: () => this.pan(share),
      "+": () => this.zoom(center, 0.7),
      "=": () => this.zoom(center, 0.7),
      "-": () => this.zoom(center, 1.4),
      0: () => this.showAll(),
      z: zoomToWindow,
      "[": () => this.#pickNext(-1),
      "]": () => this.#pickNext(1),
      Escape: () => this.state.set({ window: null, group: -1, pick: "", filter: "" }),
    };
    const action = actions[event.key];
    if (!action) return;
    action();
    event.preventDefault();
  }

  /** Pick the next or previous span of the row of the picked span. */
  #pickNext(step) {
    const picked = this.picked();
    if (!picked) return;
    const spans = picked.source === "work" ? this.model.work : this.model.calls;
    const row = this.model.rows[spans.row[picked.index] - 1];
    const next = row?.indices[row.indices.indexOf(picked.index) + step];
    if (next !== undefined) this.pickAndShow(picked.source, next);
  }

  /** Return the picked span as { source, index }, or null. */
  picked() {
    const match = /^(work|call)(\d+)$/.exec(this.state.get("pick"));
    return match ? { source: match[1], index: Number(match[2]) } : null;
  }

  /** Pick a span, and move the view to it if it is not visible or narrower than a pixel. */
  pickAndShow(source, index) {
    const spans = source === "work" ? this.model.work : this.model.calls;
    const [first, last] = this.state.get("view");
    const [start, end] = [spans.start[index], spans.end[index]];
    this.state.set({ pick: `${source}${index}` });
    if (start >= first && end <= last && end - start > (last - first) / 500) return;
    const length = Math.min(last - first, Math.max((end - start) * 30, SHORTEST_VIEW));
    this.show((start + end - length) / 2, length);
  }

  /** Return the selected window, or the whole recording. Its end is after the last activity. */
  window() {
    return this.state.get("window") || [0, this.model.duration];
  }

  windowText() {
    const [first, last] = this.window();
    return this.state.get("window") ? `the selected window of ${formatNanoseconds(last - first)}` : "the whole recording";
  }

  /** Show `length` nanoseconds from a time, limited to the recording. */
  show(first, length) {
    const end = Math.max(this.model.duration, SHORTEST_VIEW);
    const visible = Math.max(SHORTEST_VIEW, Math.min(Math.round(length), end));
    const from = Math.max(0, Math.min(Math.round(first), end - visible));
    this.state.set({ view: [from, from + visible] });
  }

  showAll() {
    this.show(0, this.model.duration);
  }

  /** Multiply the visible time by a factor; the time `center` stays at the same pixel. */
  zoom(center, factor) {
    const [first, last] = this.state.get("view");
    const length = Math.max(SHORTEST_VIEW, (last - first) * factor);
    this.show(center - ((center - first) * length) / (last - first), length);
  }

  /** Move the view by a share of the visible time. */
  pan(share) {
    const [first, last] = this.state.get("view");
    this.show(first + share * (last - first), last - first);
  }

  /** Return lines that describe a span. */
  describe({ source, index }) {
    const { model } = this;
    if (source === "range") return [model.nameOfRange(index)];
    if (source === "idle") return [`idle: ${model.facts.causes[model.mainCause(index)]}`];
    if (source === "call") return [model.nameOfCall(index), ...model.stackOfCall(index).slice(0, 4)];
    return [model.nameOfWork(index), ...model.stackOfWork(index).slice(0, 4)];
  }
}

drawExplorers("profile", (views, arrays, facts, index) => {
  const model = new ProfileModel(arrays, facts);
  if (!model.work.count && !model.calls.count) throw new Error("the profile has no GPU work and no API calls");
  return new ProfileExplorer(model, views, index ? `${index + 1}.` : "");
});
