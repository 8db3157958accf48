// The state that all views of a page share. It is stored in the fragment (#…) of the page's URL.

/** Named values, and the listeners that are called after a value changes. */
export class PageState {
  /** The prefix is added to each name in the URL, so that several explorers of one page do not collide. */
  constructor(defaults, readers, prefix = "") {
    this.prefix = prefix;
    this.defaults = { ...defaults };
    this.readers = readers;
    this.values = { ...defaults, ...this.#readUrl() };
    this.listeners = [];
    this.scheduled = false;
    this.changed = new Set();
    addEventListener("hashchange", () => this.set({ ...this.defaults, ...this.#readUrl() }));
  }

  get(name) {
    return this.values[name];
  }

  /** Change values. Listeners are called once, before the next frame is drawn. */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (JSON.stringify(this.values[name]) === JSON.stringify(value)) continue;
      this.values[name] = value;
      this.changed.add(name);
    }
    if (this.changed.size && !this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.notify());
    }
  }

  /** Add a listener, which is called with the set of the names of changed values. */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** Call the listeners if a value changed since their last call. */
  notify() {
    if (!this.changed.size) return;
    const changed = this.changed;
    this.changed = new Set();
    this.scheduled = false;
    for (const listener of this.listeners) listener(changed);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.#save(), 200);
  }

  #save() {
    const parts = location.hash.slice(1).split("&").filter((part) => part && !this.#hasReader(part.split("=")[0]));
    for (const [name, value] of Object.entries(this.values)) {
      if (JSON.stringify(value) === JSON.stringify(this.defaults[name])) continue;
      parts.push(`${this.prefix}${name}=${encodeURIComponent(Array.isArray(value) ? value.join("-") : value)}`);
    }
    history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.pathname + location.search);
  }

  #hasReader(prefixedName) {
    return prefixedName.startsWith(this.prefix) && Object.hasOwn(this.readers, prefixedName.slice(this.prefix.length));
  }

  /** Return the valid values in the URL. A reader returns undefined for an invalid value. */
  #readUrl() {
    const values = {};
    for (const part of location.hash.slice(1).split("&")) {
      const [prefixedName, text] = part.split("=");
      if (text === undefined || !this.#hasReader(prefixedName)) continue;
      const name = prefixedName.slice(this.prefix.length);
      let value;
      try {
        value = this.readers[name](decodeURIComponent(text));
      } catch {
        continue; // a damaged escape sequence
      }
      if (value !== undefined) values[name] = value;
    }
    return values;
  }
}

/** Return a function that reads a whole number from low to high; it returns undefined for other texts. */
export function numberReader(low, high) {
  return (text) => (/^-?\d{1,15}$/.test(text) && Number(text) >= low && Number(text) <= high ? Number(text) : undefined);
}

/** Return a function that reads a range "FIRST-LAST" of whole numbers from low to high. */
export function rangeReader(low, high) {
  return (text) => {
    const match = /^(-?\d{1,15})-(-?\d{1,15})$/.exec(text);
    if (!match) return undefined;
    const [first, last] = [Number(match[1]), Number(match[2])];
    return first >= low && last <= high && first < last ? [first, last] : undefined;
  };
}

/** Return a function that reads one of several texts. */
export function choiceReader(choices) {
  return (text) => (choices.includes(text) ? text : undefined);
}
