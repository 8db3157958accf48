// The difference between two snapshots as two flame graphs: call stacks whose memory grew, and those whose memory shrank.

import { Tooltip, formatBytes, make } from "./canvas.js";
import { drawExplorers } from "./explorer.js";
import { CallTree, FlameGraph } from "./flame.js";

const MOMENTS = { peak: "at the peaks", end: "at the ends" };

function draw(element, arrays, facts) {
  const tree = new CallTree(arrays.node_parent, arrays.node_frame, facts.frames);
  const tooltip = new Tooltip();
  const choices = Object.entries(MOMENTS).map(([value, text]) => make("option", { value }, text));
  const choice = make("select", { "aria-label": "Compared moments" }, ...choices);
  const graphs = {
    grown: new FlameGraph(tree, tooltip, { colorOf: (node, colors) => colors.bands[5] }),
    shrunk: new FlameGraph(tree, tooltip, { colorOf: (node, colors) => colors.bands[0] }),
  };
  const titles = { grown: make("h3", {}), shrunk: make("h3", {}) };
  const show = () => {
    for (const [kind, graph] of Object.entries(graphs)) {
      graph.show(arrays[`${choice.value}_${kind}`]);
      titles[kind].textContent = `${kind === "grown" ? "Grown by" : "Shrunk by"} ${formatBytes(graph.total[0])}`;
    }
  };
  choice.addEventListener("change", show);
  element.replaceChildren(make("div", { class: "toolbar" }, choice), titles.grown, graphs.grown.element, titles.shrunk, graphs.shrunk.element, tooltip.element);
  show();
}

drawExplorers("memory_difference", draw);
