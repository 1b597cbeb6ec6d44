// Draw a digit; three ONNX files say what it is, and one of them how sure. No request but for the files of this folder.
import * as ort from "./ort/ort.wasm.min.mjs";

ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // several need a page served with isolation headers

const SAMPLES = 100;
const SEED = 1; // the same drawing gives the same answer
const REPEATS = 30;

const byId = (id) => document.getElementById(id);
const make = (tag, text = "", kind = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
};

// Drawing

const canvas = byId("canvas");
const pen = canvas.getContext("2d", { willReadFrequently: true });
pen.lineWidth = 20;
pen.lineCap = pen.lineJoin = "round";
pen.strokeStyle = "#fff";
let last = null;
let drawn = false;

const place = (event) => {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
};
const line = (from, to) => {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
  drawn = true;
};
const clear = () => {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  drawn = false;
};

// Strokes of a few digits, in units of the drawing area.
const EXAMPLES = [
  [[[90, 70], [190, 70], [150, 140], [125, 215]]],
  [[[95, 95], [115, 68], [155, 62], [185, 85], [175, 125], [130, 170], [92, 212], [195, 212]]],
  [[[98, 75], [140, 58], [180, 80], [172, 118], [132, 135], [178, 150], [188, 188], [150, 218], [98, 205]]],
  [[[150, 58], [118, 100], [98, 150], [105, 195], [140, 218], [178, 200], [182, 165], [150, 145], [108, 165]]],
];
let turn = 0;

// The input: the ink in a square of 20 of 28 pixels, its center of mass in the middle, as in MNIST.

const picture = (side) => {
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let [left, top, right, bottom] = [canvas.width, canvas.height, -1, -1];
  for (let y = 0; y < canvas.height; y++) {
    for (let x = 0; x < canvas.width; x++) {
      if (data[4 * (y * canvas.width + x) + 3] > 16) {
        left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
      }
    }
  }
  const pixels = new Float32Array(side * side);
  if (right < 0) return pixels;
  const [wide, high] = [right - left + 1, bottom - top + 1];
  const scale = Math.round(side * 20 / 28) / Math.max(wide, high);
  const sheet = new OffscreenCanvas(side, side);
  const context = sheet.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  const [w, h] = [wide * scale, high * scale];
  context.drawImage(canvas, left, top, wide, high, (side - w) / 2, (side - h) / 2, w, h);
  const ink = context.getImageData(0, 0, side, side).data;
  let [mass, atX, atY] = [0, 0, 0];
  for (let k = 0; k < side * side; k++) {
    mass += ink[4 * k + 3]; atX += ink[4 * k + 3] * (k % side); atY += ink[4 * k + 3] * Math.floor(k / side);
  }
  const [dx, dy] = [Math.round((side - 1) / 2 - atX / mass), Math.round((side - 1) / 2 - atY / mass)];
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      const [fromX, fromY] = [x - dx, y - dy];
      if (fromX >= 0 && fromX < side && fromY >= 0 && fromY < side) pixels[y * side + x] = ink[4 * (fromY * side + fromX) + 3] / 255;
    }
  }
  return pixels;
};

const show = (pixels, side) => {
  const small = byId("small");
  small.width = small.height = side;
  const context = small.getContext("2d");
  const image = context.createImageData(side, side);
  pixels.forEach((value, k) => { image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * k); });
  context.putImageData(image, 0, 0);
};

// The models

const softmax = (logits) => {
  const most = Math.max(...logits);
  const parts = Array.from(logits, (value) => Math.exp(value - most));
  const total = parts.reduce((a, b) => a + b);
  return parts.map((part) => part / total);
};

const about = await (await fetch("models/models.json")).json();
const side = about.side;
const sessions = {};
for (const model of about.models) {
  sessions[model.file] = await ort.InferenceSession.create(`models/${model.file}`, { executionProviders: ["wasm"] });
}

const feeds = (model, pixels) => {
  const found = { [about.input]: new ort.Tensor("float32", pixels, about.shape) };
  if (model.samples) {
    found.samples = new ort.Tensor("int64", BigInt64Array.of(BigInt(SAMPLES)), []);
    found.seed = new ort.Tensor("int64", BigInt64Array.of(BigInt(SEED)), []);
  }
  return found;
};

const ask = async (model, pixels) => {
  const outputs = await sessions[model.file].run(feeds(model, pixels));
  if (!model.samples) return { chances: softmax(outputs[model.output].data) };
  return {
    chances: Array.from(outputs.mean.data),
    entropy: outputs.predictive_entropy.data[0],
    information: outputs.mutual_information.data[0],
  };
};

const time = async (model) => {
  const inputs = feeds(model, picture(side));
  const took = [];
  for (let k = 0; k < (model.samples ? 5 : REPEATS); k++) {
    const began = performance.now();
    for (let n = 0; n < (model.samples ? 1 : 20); n++) await sessions[model.file].run(inputs);
    took.push((performance.now() - began) / (model.samples ? 1 : 20));
  }
  return took.sort((a, b) => a - b)[Math.floor(took.length / 2)];
};

// Answers

const card = (model, answer) => {
  const box = make("article", "", "card");
  const best = answer.chances.indexOf(Math.max(...answer.chances));
  const second = answer.chances.map((chance, k) => [chance, k]).filter(([, k]) => k !== best).sort((a, b) => b[0] - a[0])[0][1];
  const sure = answer.chances[best];
  const unsure = sure < about.answer_above;
  const percent = (share) => `${(100 * share).toFixed(share > 0.995 ? 1 : 0)}%`;
  box.append(make("h3", model.name));
  box.append(make("div", about.classes[best], "answer"));
  const words = unsure ? `not sure: ${percent(sure)}, or ${about.classes[second]}?` : `${percent(sure)} sure`;
  const line = make("div", "", "sure");
  line.append(make("span", words, unsure ? "poor" : "good"));
  if (answer.information !== undefined) {
    line.append(make("div", `entropy ${answer.entropy.toFixed(2)}, mutual information ${answer.information.toFixed(3)} nats`, "quiet"));
  }
  box.append(line);
  const bars = make("ol", "", "bars");
  bars.setAttribute("aria-label", `Probabilities, ${model.name}`);
  answer.chances.forEach((chance, k) => {
    const item = make("li");
    item.append(make("span", about.classes[k]));
    const bar = make("i");
    bar.style.width = `${100 * chance}%`;
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", percent(chance));
    item.append(bar);
    bars.append(item);
  });
  box.append(bars);
  return box;
};

let asked = 0;
const answer = async () => {
  const number = ++asked;
  const pixels = picture(side);
  show(pixels, side);
  if (!drawn) {
    byId("cards").replaceChildren();
    byId("status").textContent = "Draw something.";
    return;
  }
  const cards = [];
  for (const model of about.models) {
    cards.push(card(model, await ask(model, pixels)));
    if (number !== asked) return; // something newer was drawn
  }
  byId("cards").replaceChildren(...cards);
  byId("status").textContent = `${about.models.at(-1).name}: ${cards.at(-1).querySelector(".answer").textContent}, ` +
    cards.at(-1).querySelector(".sure span").textContent;
};

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  last = place(event);
  line(last, last);
});
canvas.addEventListener("pointermove", (event) => {
  if (!last) return;
  for (const part of event.getCoalescedEvents?.() ?? [event]) {
    const now = place(part);
    line(last, now);
    last = now;
  }
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, () => {
    if (last) { last = null; answer(); }
  });
}
byId("clear").addEventListener("click", () => { clear(); answer(); });
byId("example").addEventListener("click", () => {
  clear();
  for (const stroke of EXAMPLES[turn++ % EXAMPLES.length]) stroke.slice(1).forEach((to, k) => line(stroke[k], to));
  answer();
});

// Costs

const size = (bytes) => bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e3).toFixed(0)} kB`;
const table = () => {
  const head = make("tr");
  head.append(make("td"), ...about.models.map((model) => {
    const cell = make("th", model.name);
    cell.scope = "col";
    return cell;
  }));
  const rows = {
    File: (model) => size(model.bytes),
    Parameters: (model) => model.parameters?.toLocaleString("en") ?? "–",
    "Non-zeros": (model) => model.nonzero?.toLocaleString("en") ?? "–",
    "Error on test data": (model) => model.error === undefined ? "–" : `${model.error.toFixed(2)}%`,
    "Time here": (model) => model.time === undefined ? "…" : `${model.time.toFixed(model.time < 1 ? 3 : 1)} ms`,
  };
  const body = Object.entries(rows).map(([name, cell]) => {
    const row = make("tr");
    const first = make("th", name);
    first.scope = "row";
    row.append(first, ...about.models.map((model) => make("td", cell(model))));
    return row;
  });
  const [thead, tbody] = [make("thead"), make("tbody")];
  thead.append(head);
  tbody.append(...body);
  byId("table").replaceChildren(thead, tbody);
};
byId("note").textContent = about.note;
table();
await answer();
for (const model of about.models) {
  model.time = await time(model);
  table();
}
document.documentElement.dataset.ready = "yes";
