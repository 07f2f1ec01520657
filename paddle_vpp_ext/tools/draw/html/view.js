"use strict";
// The page around the planner. START has the first state, the colours, and perhaps orders that only Python can plan.

const ROW = 26, AXIS = 22;
const FIELDS = {
  shape: [["p", "stages", 2, 32, 1], ["V", "chunks a stage", 1, 8, 1], ["m", "micro-batches", 1, 128, 1]],
  costs: [["F", "forward", 0, 10, 0.1], ["I", "input grad", 0, 10, 0.1], ["W", "weight grad", 0, 10, 0.1], ["hop", "transfer", 0, 2, 0.01]],
  limit: [["limit", "limit", 0, 64, 0.25]],
};
const KINDS = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
const state = {...START.state};
const byId = id => document.getElementById(id);
const percent = share => (100 * share).toFixed(1) + " %";
const short = x => String(Number(x.toPrecision(5)));
let shown = null;

function make(tag, parent, text = "", name = "") {
  const node = parent.appendChild(document.createElement(tag));
  node.textContent = text;
  if (name) node.className = name;
  return node;
}

function makeFields() {
  for (const [group, fields] of Object.entries(FIELDS)) {
    const box = document.querySelector(`[data-of=${group}]`);
    for (const [key, title, least, most, step] of fields) {
      const label = make("label", box, "", "field");
      make("b", make("span", label), key === "limit" ? "" : key + " ");
      label.firstChild.append(title);
      const slider = make("input", label), number = make("input", label);
      Object.assign(slider, {type: "range", id: key, min: least, step});
      Object.assign(number, {type: "number", id: key + "-number", min: least, step: step < 1 ? "any" : 1});
      if (step === 1) number.max = Math.max(4 * most, state[key]);  // more would take the page seconds
      number.required = key !== "limit";
      if (key === "limit") number.placeholder = "none";
      slider.max = Math.max(most, state[key] ?? 0);
      slider.value = state[key] ?? slider.max;
      number.value = state[key] ?? "";
      slider.addEventListener("input", () => { number.value = slider.value; change(key, number); });
      number.addEventListener("input", () => {
        if (Number(number.value) > Number(slider.max)) slider.max = number.value;
        slider.value = number.value === "" ? slider.max : number.value;
        change(key, number);
      });
    }
  }
  make("div", document.querySelector("[data-of=costs]"), "of one chunk, in any unit; a backward takes I + W", "note");
  make("div", document.querySelector("[data-of=limit]"), "activations a rank may hold, in micro-batches of a whole stage", "note");
}

function change(key, number) {
  if (!number.checkValidity()) return;
  state[key] = number.value === "" ? null : Number(number.value);
  update();
}

// All schedules under the state; those that Python planned stand for their own p, V and m only.
function planAll() {
  const {p, V, m} = state, plans = {}, given = START.given;
  for (const name of Object.keys(SCHEDULES)) plans[name] = plan(name, state);
  if (given) {
    const fits = given.p === p && given.V === V && given.m === m;
    plans[given.name] = fits ? {...simulate(given.orders, V, m, state), V} : null;
  }
  return plans;
}

function worst(result) { return Math.max(...result.peak) / result.V; }
function fits(result) { return state.limit === null || worst(result) <= state.limit; }

function remark(name, result, rule) {
  const words = [];
  if (!result) return `planned for p=${START.given.p}, V=${START.given.V}, m=${START.given.m} only`;
  if (name === rule) words.push("the selector's choice");
  if (name === "1F1B" && state.V > 1) words.push("a stage in one chunk");
  if (!fits(result)) words.push("over the memory limit");
  return words.join(", ");
}

function update() {
  const plans = planAll(), body = document.querySelector("#choices tbody"), rule = select(state.p, state.V, state.m);
  if (!plans[state.schedule]) state.schedule = rule ?? Object.keys(SCHEDULES)[0];
  body.replaceChildren();
  for (const [name, result] of Object.entries(plans)) {
    const row = make("tr", body, "", name === state.schedule ? "on" : ""), label = make("label", make("td", row));
    const radio = Object.assign(make("input", label), {type: "radio", name: "schedule", checked: name === state.schedule, disabled: !result});
    label.append(" " + name);
    row.dataset.name = name;
    const figures = result ? [short(result.makespan), percent(mean(result.idle)), short(worst(result))] : ["", "", ""];
    figures.forEach(text => make("td", row, text));
    make("td", row, remark(name, result, rule), result && !fits(result) ? "remark bad" : "remark");
    if (result) row.addEventListener("click", () => {
      state.schedule = name;
      update();
      document.querySelector("#choices input:checked").focus();
    });
  }
  show(plans[state.schedule]);
}

function mean(list) { return list.reduce((a, b) => a + b, 0) / list.length; }

function show(result) {
  shown = result;
  byId("name").textContent = state.schedule;
  byId("figures").innerHTML = `makespan <b>${short(result.makespan)}</b>&emsp; idle <b>${percent(mean(result.idle))}</b>&emsp; ` +
    `peak <b>${short(worst(result))}</b> micro-batches`;
  showLegend(result);
  showRanks(result);
  draw();
}

function showLegend(result) {
  const legend = byId("legend"), kinds = new Set(result.orders.flatMap(order => order.map(a => a[0])));
  legend.replaceChildren();
  for (const kind of Object.keys(KINDS).filter(k => kinds.has(k))) {
    const entry = make("span", legend);
    for (let c = 0; c < result.V; c++) {
      const box = make("i", entry, result.V > 1 ? c : "");
      Object.assign(box.style, {background: shade(kind, c, result.V), color: ink(shade(kind, c, result.V))});
    }
    entry.append(" " + KINDS[kind]);
  }
  make("i", make("span", legend), "\u00a0").style.background = "#eceff2";
  legend.lastChild.append(" idle");
  if (result.V > 1) make("span", legend, "shade: chunk");
}

function showRanks(result) {
  const ranks = byId("ranks"), p = result.orders.length, scroll = ranks.querySelector(".scroll");
  const most = Math.max(worst(result), state.limit ?? 0);
  ranks.replaceChildren(scroll);
  scroll.style.gridRow = `1 / span ${p + 1}`;
  const place = (name, row, text = "") => { const cell = make("div", ranks, text, name); cell.style.gridRow = row; return cell; };
  for (let rank = 0; rank < p; rank++) {
    place("rank", rank + 1, "rank " + rank);
    const held = result.peak[rank] / result.V, over = state.limit !== null && held > state.limit;
    bar(place("idle bar", rank + 1), result.idle[rank], percent(result.idle[rank]));
    bar(place("peak bar" + (over ? " bad" : ""), rank + 1), most ? held / most : 0, short(held));
  }
  place("idle title", p + 1, "idle");
  place("peak title", p + 1, "peak, micro-batches");
}

function bar(cell, share, text) {
  make("i", make("div", cell, "", "track")).style.width = 100 * share + "%";
  make("span", cell, text);
}

// ---- the timeline

function draw() {
  const canvas = byId("canvas"), ratio = window.devicePixelRatio || 1, p = shown.orders.length;
  const width = Math.min(canvas.parentNode.clientWidth * byId("zoom").value, 30000 / ratio), height = p * ROW + AXIS;
  Object.assign(canvas, {width: width * ratio, height: height * ratio});
  Object.assign(canvas.style, {width: width + "px", height: height + "px"});
  const pen = canvas.getContext("2d"), scale = shown.makespan ? width / shown.makespan : 0;
  pen.scale(ratio, ratio);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let rank = 0; rank < p; rank++) {
    pen.fillStyle = "#eceff2";
    pen.fillRect(0, rank * ROW + 2, width, ROW - 4);
    shown.orders[rank].forEach(([kind, chunk, i], j) => {
      const [start, end] = shown.spans[rank][j], wide = (end - start) * scale, colour = shade(kind, chunk, shown.V);
      const gap = Math.min(1, 0.1 * wide);
      pen.fillStyle = colour;
      pen.fillRect(start * scale, rank * ROW + 2, wide - gap, ROW - 4);
      if (wide < 6 * String(i).length + 2) return;
      pen.font = `${wide < 8 * String(i).length + 2 ? 10 : 11}px system-ui, sans-serif`;
      pen.fillStyle = ink(colour);
      pen.fillText(i, start * scale + (wide - gap) / 2, rank * ROW + ROW / 2);
    });
  }
  drawAxis(pen, width, p * ROW, scale);
}

function drawAxis(pen, width, y, scale) {
  if (!scale) return;
  const rough = 80 / scale, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
  pen.fillStyle = "#66727f";
  pen.font = "11px system-ui, sans-serif";
  for (let k = 0; k * step * scale <= width; k++) {
    const x = k * step * scale, half = pen.measureText(short(k * step)).width / 2;
    pen.fillRect(x, y, 1, 4);
    if (x + half <= width) pen.fillText(short(k * step), Math.max(x, half), y + 13);
  }
}

function shade(kind, chunk, V) {
  const white = V > 1 ? START.lightest * chunk / (V - 1) : 0;
  return "#" + parts(START.hues[kind]).map(c => Math.round(c + (255 - c) * white).toString(16).padStart(2, "0")).join("");
}

function ink(colour) {
  const [red, green, blue] = parts(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000000" : "#ffffff";
}

function parts(colour) { return [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)); }

function point(event) {
  const hint = byId("hint"), box = byId("canvas").getBoundingClientRect();
  const rank = Math.floor((event.clientY - box.top) / ROW), now = (event.clientX - box.left) / box.width * shown.makespan;
  const j = (shown.spans[rank] ?? []).findIndex(([start, end]) => start <= now && now < end);
  hint.textContent = "";
  if (j < 0) return;
  const [kind, chunk, i] = shown.orders[rank][j], [start, end] = shown.spans[rank][j];
  hint.textContent = `${kind}${chunk}.${i} on rank ${rank}: ${KINDS[kind]} of chunk ${chunk}, micro-batch ${i}, ${short(start)} to ${short(end)}`;
  const right = event.clientX + 14 + hint.offsetWidth < window.innerWidth;
  hint.style.left = (right ? event.clientX + 14 : event.clientX - 14 - hint.offsetWidth) + "px";
  hint.style.top = event.clientY + 14 + "px";
}

byId("zoom").addEventListener("input", draw);
byId("canvas").addEventListener("mousemove", point);
byId("canvas").addEventListener("mouseleave", () => { byId("hint").textContent = ""; });
window.addEventListener("resize", draw);
makeFields();
update();
