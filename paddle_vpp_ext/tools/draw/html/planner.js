"use strict";
// The planner of paddle_vpp_ext/schedule: the same orders, and the same times to the last bit
// (tests/tools/test_page.py). An action is [kind, chunk, micro-batch]; p, V, m as in Python.

const GROUPINGS = {
  first(p, m) {
    const head = Math.min(m % p + p, m);
    return [head, ...Array((m - head) / p).fill(p)];
  },
  even(p, m) {
    const count = Math.max(1, Math.floor(m / p)), size = Math.floor(m / count), larger = m % count;
    return Array.from({length: count}, (_, k) => size + (k < larger ? 1 : 0));
  },
};

function sequence(kind, V, groups) {
  const order = [];
  let start = 0;
  for (const size of groups) {
    for (let c = 0; c < V; c++)
      for (let i = start; i < start + size; i++) order.push([kind, kind === "F" ? c : V - 1 - c, i]);
    start += size;
  }
  return order;
}

function interleaved(p, V, groups, slope) {
  const forwards = sequence("F", V, groups), backwards = sequence("B", V, groups);
  return Array.from({length: p}, (_, rank) => {
    const startup = Math.min(slope * (p - 1 - rank) + (V - 1) * groups[0], forwards.length);
    const order = forwards.slice(0, startup);
    for (let k = startup; k < forwards.length; k++) order.push(forwards[k], backwards[k - startup]);
    return order.concat(backwards.slice(forwards.length - startup));
  });
}

function fthenb(p, V, m) {
  const order = sequence("F", V, [m]).concat(sequence("B", V, [m]));
  return Array.from({length: p}, () => order);
}

// What can be chosen, by its name in schedule_mode. 1F1B puts the whole stage into one chunk.
const SCHEDULES = {
  "VPP:groups=first,slope=2": (p, V, m) => interleaved(p, V, GROUPINGS.first(p, m), 2),
  "VPP:groups=first,slope=1": (p, V, m) => interleaved(p, V, GROUPINGS.first(p, m), 1),
  "VPP:groups=even,slope=2": (p, V, m) => interleaved(p, V, GROUPINGS.even(p, m), 2),
  "VPP:groups=even,slope=1": (p, V, m) => interleaved(p, V, GROUPINGS.even(p, m), 1),
  "FthenB": fthenb,
  "1F1B": (p, V, m) => interleaved(p, 1, [m], 1),
};

// The selector's rule; null where it refuses.
function select(p, V, m) {
  if (V === 1) return "VPP:groups=first,slope=1";
  if (m >= 2 * p) return "VPP:groups=first,slope=2";
  return m >= p ? "FthenB" : null;
}

// Each action as early as its order allows; transfers take hop and never block. null: the orders wait for each other.
function simulate(orders, V, m, {F, I, W, hop}) {
  const p = orders.length, last = p * V - 1, time = {F, B: I + W, I, W};
  const made = {F: new Float64Array(p * V * m).fill(NaN), B: new Float64Array(p * V * m).fill(NaN)};
  const waiting = new Map(), spans = orders.map(() => []), clock = Array(p).fill(0);
  const todo = orders.map((_, rank) => rank);
  while (todo.length) {
    const rank = todo.pop(), order = orders[rank], span = spans[rank];
    while (span.length < order.length) {
      const [kind, chunk, i] = order[span.length];
      const part = chunk * p + rank, of = kind === "F" ? "F" : "B", step = kind === "F" ? 1 : -1;
      let start = clock[rank];
      if (kind !== "W" && part !== (kind === "F" ? 0 : last)) {
        const need = (part - step) * m + i, there = made[of][need];
        if (Number.isNaN(there)) { waiting.set(of + need, rank); break; }
        start = Math.max(start, there + hop);
      }
      const end = start + time[kind], key = of + (part * m + i);
      span.push([start, end]);
      clock[rank] = end;
      if (kind === "W") continue;
      made[of][part * m + i] = end;
      if (waiting.has(key)) todo.push(waiting.get(key));
    }
  }
  if (spans.some((span, rank) => span.length < orders[rank].length)) return null;
  const makespan = Math.max(...clock);
  const busy = spans.map(span => span.reduce((sum, [start, end]) => sum + (end - start), 0));
  return {orders, spans, makespan, idle: busy.map(b => makespan ? 1 - b / makespan : 0), peak: orders.map(peakActivations)};
}

// Most activations held at once, in chunks: from F to B, or to W.
function peakActivations(order) {
  let held = 0, peak = 0;
  for (const [kind] of order) {
    held += {F: 1, B: -1, I: 0, W: -1}[kind];
    peak = Math.max(peak, held);
  }
  return peak;
}

// A schedule under a state {p, V, m, F, I, W, hop}; the result also has V, the chunks that it cuts a stage into.
function plan(name, state) {
  const {p, V, m, F, I, W, hop} = state;
  if (name === "1F1B") {
    return {...simulate(SCHEDULES[name](p, V, m), 1, m, {F: F * V, I: I * V, W: W * V, hop}), V: 1};
  }
  return {...simulate(SCHEDULES[name](p, V, m), V, m, {F, I, W, hop}), V};
}
