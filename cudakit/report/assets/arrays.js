// Reads the arrays that render/html/explorer.py writes: byte planes, deflated, in base64.

const CHUNK = 1 << 20; // number of characters that one task decodes, so that the page stays responsive

/** Return an array for each description: u1, i4 and u4 as typed arrays, u8 and i8 as Float64Array. */
export async function unpackArrays(descriptions, text) {
  const bytes = await inflate(fromBase64(text), descriptions.reduce((sum, array) => sum + byteCount(array), 0));
  const arrays = {};
  let offset = 0;
  for (const array of descriptions) {
    arrays[array.name] = fromPlanes(bytes.subarray(offset, offset + byteCount(array)), array);
    offset += byteCount(array);
    await nextTask();
  }
  return arrays;
}

function byteCount(array) {
  return array.length * Number(array.type[1]);
}

/** Wait until the browser has handled events and drawn. */
export function nextTask() {
  return new Promise((resolve) => setTimeout(resolve));
}

/** Yield the bytes of a base64 text in pieces. */
function* fromBase64(text) {
  for (let start = 0; start < text.length; start += CHUNK) {
    const characters = atob(text.slice(start, start + CHUNK));
    const bytes = new Uint8Array(characters.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
    yield bytes;
  }
}

async function inflate(pieces, length) {
  const stream = new DecompressionStream("deflate");
  const writing = writeAll(stream.writable.getWriter(), pieces);
  const bytes = new Uint8Array(length);
  const reader = stream.readable.getReader();
  let filled = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    bytes.set(value, filled);
    filled += value.length;
  }
  await writing;
  if (filled !== length) throw new Error(`the page has ${filled} bytes of data, not ${length}`);
  return bytes;
}

async function writeAll(writer, pieces) {
  for (const piece of pieces) {
    await writer.ready;
    await writer.write(piece);
  }
  await writer.close();
}

/** Return the numbers of one array from its bytes. If `sum` is true, the bytes hold differences of the numbers. */
function fromPlanes(bytes, { type, length, sum }) {
  if (type === "u1") return bytes.slice();
  const isLong = type[1] === "8";
  const numbers = isLong ? new Float64Array(length) : new Int32Array(length);
  for (let plane = Number(type[1]) - 1; plane >= 0; plane--) {
    const digits = bytes.subarray(plane * length, (plane + 1) * length);
    if (isLong) for (let i = 0; i < length; i++) numbers[i] = numbers[i] * 256 + digits[i];
    else for (let i = 0; i < length; i++) numbers[i] = (numbers[i] << 8) | digits[i];
  }
  // The first bit of an i8 has the value -2**63.
  if (type === "i8") for (let i = 0; i < length; i++) if (bytes[7 * length + i] > 127) numbers[i] = negativeNumber(bytes, i, length);
  const typed = type === "u4" ? new Uint32Array(numbers.buffer) : numbers;
  if (!sum) return typed;
  const sums = new Float64Array(length);
  for (let i = 0, total = 0; i < length; i++) sums[i] = total += typed[i];
  // Small differences may add up to numbers that need more than 32 bits.
  return isLong || sums[length - 1] > 0x7fffffff ? sums : Int32Array.from(sums);
}

/** Return a negative number of 8 bytes. Computing it from its complement keeps small numbers exact. */
function negativeNumber(bytes, index, length) {
  let complement = 0;
  for (let plane = 7; plane >= 0; plane--) complement = complement * 256 + (255 - bytes[plane * length + index]);
  return -complement - 1;
}
