// What all interactive pictures do: check the browser, read the data, draw, and say if that fails.

import { unpackArrays } from "./arrays.js";
import { make } from "./canvas.js";

const REQUIRED_APIS = ["DecompressionStream", "ResizeObserver", "PointerEvent"];

/**
 * Draw all explorers of a kind with draw(views, arrays, facts, index).
 *
 * `views` is the element to fill, `index` counts the explorers of this kind on the page. What draw() returns
 * becomes the property `explorer` of the element, which then sends the event "explorer-ready".
 */
export function drawExplorers(kind, draw) {
  for (const [index, element] of document.querySelectorAll(`.explorer[data-kind="${kind}"]`).entries()) {
    drawExplorer(element, index, draw).catch((error) => {
      const message = `The interactive views cannot be drawn: ${error.message}.`;
      element.querySelector(".explorer-views").replaceChildren(make("p", { class: "muted" }, message));
      element.dataset.ready = "failed";
    });
  }
}

async function drawExplorer(element, index, draw) {
  const missing = REQUIRED_APIS.filter((name) => !(name in globalThis));
  if (missing.length) throw new Error(`this browser lacks ${missing.join(", ")}`);
  const { arrays: described, facts } = JSON.parse(element.querySelector("script.explorer-facts").textContent);
  const arrays = await unpackArrays(described, element.querySelector("script.explorer-data").textContent.trim());
  element.explorer = draw(element.querySelector(".explorer-views"), arrays, facts, index);
  element.dataset.ready = "true";
  element.dispatchEvent(new CustomEvent("explorer-ready", { bubbles: true }));
}
