"use strict";
// Draws the rows of the data on one canvas. Times are nanoseconds. What is visible is drawn anew on every change: a row
// is searched for its first visible span, and spans narrower than a pixel share that pixel.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent).picture;
  const canvas = document.getElementById("picture");
  if (!data || !canvas) return;
  const context = canvas.getContext("2d"), tip = document.getElementById("tip"), range = document.getElementById("range");
  const LEFT = 104, RIGHT = 8, AXIS = 22, TITLE = 22, COMPUTES = "FBIW", MESSAGES = "fb";
  const count = data.panels.reduce((sum, panel) => sum + panel.rows.length, 0);
  const MANY = 16, SUMMARY = 26;  // panels with more rows begin with one of all ranks
  const NARROW = count <= 8 ? 30 : count <= 24 ? 22 : count <= 48 ? 17 : 13;
  let ROW = NARROW, from = 0, to = data.step || 1, memory = false, drag = null, colours = {};

  for (const panel of data.panels) for (const row of panel.rows) unpack(panel, row);

  function unpack(panel, row) {
    let at = 0;
    row.start = row.gap.map((gap) => (at += gap));
    row.end = row.start.map((start, i) => start + panel.lengths[row.long[i]]);
    row.lanes = row.stages.length || 1;
    // Ends are not in order where messages overlap computes: the latest end so far tells where to begin drawing.
    row.chain = new Set(row.path || []);
    let latest = 0;
    row.latest = row.end.map((end) => (latest = Math.max(latest, end)));
    if (row.memory) {
      let moment = 0;
      row.memory.at = row.memory.gap.map((gap) => (moment += gap));
      row.memory.bytes = row.memory.level.map((level) => row.memory.levels[level]);
      row.memory.top = row.memory.levels[row.memory.levels.length - 1] || 1;
    }
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["F", "B", "I", "W", "sums", "f", "b", "idle", "wait", "memory", "limit", "text", "soft", "line", "back", "on-F", "on-B"])
      colours[name] = style.getPropertyValue("--" + name).trim();
  }
  const colour = (kind) => (COMPUTES.includes(kind) || MESSAGES.includes(kind) ? colours[kind] : kind === "A" ? colours.wait : colours.sums);
  const stageOf = (row, i) => (row.stage ? row.stage[i] : row.stages[0]);
  function labelOf(row, i) {
    const kind = row.kinds[i], stage = stageOf(row, i), message = MESSAGES.includes(kind);
    const once = !(COMPUTES + MESSAGES + "U").includes(kind);
    const slice = row.micro[i] % data.slices, micro = Math.floor(row.micro[i] / data.slices);
    const peer = message ? (row.peers && row.peers[i] !== undefined ? row.peers[i] : stage + (kind === "f" ? 1 : -1)) : null;
    return stage + (message ? "S" + (kind === "f" ? "F" : "B") : kind) + (once ? "" : micro + (slice ? "." + slice : "")) +
      (message ? ">" + peer : "");
  }
  function time(ns) {
    for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
      if (Math.abs(ns) >= size) return (ns / size).toFixed(Math.abs(ns) < 100 * size ? 2 : 1) + " " + unit;
    return ns ? Math.round(ns) + " ns" : "0";
  }
  function bytes(size) {
    for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
      if (size >= unit) return (size / unit).toFixed(size < 100 * unit ? 2 : 1) + " " + name;
    return Math.round(size) + " B";
  }
  function firstAfter(list, value) {  // the first index whose entry is above the value; entries ascend
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] > value) high = middle; else low = middle + 1;
    }
    return low;
  }

  const width = () => canvas.clientWidth - LEFT - RIGHT;
  const x = (ns) => LEFT + ((ns - from) / (to - from)) * width();
  const ns = (px) => from + ((px - LEFT) / width()) * (to - from);
  const summaryOf = (panel) => (panel.rows.length > MANY ? SUMMARY + 5 : 0);
  const heightOf = (panel) => TITLE + summaryOf(panel) + panel.rows.length * (ROW + 3) + AXIS;

  function draw() {
    const ratio = window.devicePixelRatio || 1, wide = canvas.clientWidth;
    const tall = data.panels.reduce((sum, panel) => sum + heightOf(panel), 0);
    canvas.style.height = tall + "px";
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(tall * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    let y = 0;
    for (const panel of data.panels) {
      context.fillStyle = colours.text;
      context.textAlign = "left";
      context.fillText(panel.name + ": " + time(panel.step), LEFT, y + TITLE / 2);
      if (summaryOf(panel)) drawSummary(panel, y + TITLE);
      panel.top = y + TITLE + summaryOf(panel);
      panel.rows.forEach((row, place) => drawRow(panel, row, panel.top + place * (ROW + 3)));
      drawAxis(panel.top + panel.rows.length * (ROW + 3));
      y += heightOf(panel);
    }
    if (drag && Math.abs(drag.now - drag.begin) > 3) {
      context.globalAlpha = 0.2;
      context.fillStyle = colours.text;
      context.fillRect(Math.min(drag.begin, drag.now), 0, Math.abs(drag.now - drag.begin), tall);
      context.globalAlpha = 1;
    }
    range.textContent = time(from) + " – " + time(to);
  }

  function drawRow(panel, row, y) {
    row.y = y;
    context.fillStyle = colours.soft;
    context.textAlign = "left";
    context.fillText(row.label, 2, y + ROW / 2, LEFT - 8);
    context.save();
    context.beginPath();
    context.rect(LEFT, y, width(), ROW);
    context.clip();
    context.fillStyle = colours.idle;
    context.fillRect(LEFT, y, x(Math.min(to, panel.step)) - LEFT, ROW);
    if (memory && row.memory) drawMemory(row, y); else drawSpans(row, y);
    context.restore();
  }

  function drawSummary(panel, y) {  // of all ranks, the share that runs each kind of compute in every pixel
    const wide = Math.max(1, Math.round(width())), shares = [...COMPUTES].map(() => new Float64Array(wide));
    let ranks = 0;
    for (const row of panel.rows) {
      ranks += row.ranks;
      for (let i = firstAfter(row.latest, from); i < row.start.length && row.start[i] < to; i++) {
        const share = shares[COMPUTES.indexOf(row.kinds[i])];
        if (!share) continue;
        const left = Math.max(0, x(row.start[i]) - LEFT), right = Math.min(wide, x(row.end[i]) - LEFT);
        for (let px = Math.floor(left); px < right; px++)
          share[px] += row.ranks * (Math.min(px + 1, right) - Math.max(px, left));
      }
    }
    context.fillStyle = colours.soft;
    context.textAlign = "left";
    context.fillText("all " + ranks + " ranks", 2, y + SUMMARY / 2, LEFT - 8);
    context.fillStyle = colours.idle;
    context.fillRect(LEFT, y, x(Math.min(to, panel.step)) - LEFT, SUMMARY);
    for (let px = 0; px < wide; px++) {
      let bottom = y + SUMMARY;
      shares.forEach((share, kind) => {
        const tall = (share[px] / ranks) * SUMMARY;
        context.fillStyle = colours[COMPUTES[kind]];
        context.fillRect(LEFT + px, bottom - tall, 1, tall);
        bottom -= tall;
      });
    }
  }

  function drawSpans(row, y) {
    const messages = Math.max(2, Math.round(ROW / 6)), lane = (ROW - messages - 1) / row.lanes, painted = {};
    for (let i = firstAfter(row.latest, from); i < row.start.length && row.start[i] < to; i++) {
      const kind = row.kinds[i], left = x(row.start[i]), right = x(row.end[i]), message = MESSAGES.includes(kind);
      const compute = COMPUTES.includes(kind);
      if (right <= LEFT || (!compute && right === left)) continue;
      const column = Math.floor(right), key = kind + (row.stage ? row.stage[i] : "");
      if (right - left < 0.5 && painted[key] === column) continue;
      painted[key] = column;
      const top = message ? y + ROW - messages : y + (row.stage && compute ? row.stages.indexOf(row.stage[i]) * lane : 0);
      const tall = message ? messages : compute ? lane : ROW - messages - 1, wide = right - left;
      context.fillStyle = colour(kind);
      context.fillRect(left, top, Math.max(wide - (wide > 4 ? 0.7 : 0), 0.6), tall);
      if (row.chain.has(i)) {
        context.fillStyle = colours.limit;
        context.fillRect(left, message ? top : y, Math.max(wide, 1), 2);
      }
      if (compute && lane >= 9) drawLabel(row, i, Math.max(left, LEFT), Math.min(right, LEFT + width()), top + tall / 2);
    }
  }

  function drawLabel(row, i, left, right, y) {
    const kind = row.kinds[i], whole = labelOf(row, i), own = row.stage ? whole : whole.slice(String(stageOf(row, i)).length);
    const text = [own, kind].find((each) => each.length * 6.5 + 3 < right - left);
    if (!text) return;
    context.fillStyle = kind === "F" || kind === "W" ? colours["on-F"] : colours["on-B"];
    context.textAlign = "center";
    context.fillText(text, (left + right) / 2, y + 0.5);
  }

  function drawMemory(row, y) {
    const curve = row.memory, scale = Math.max(row.limit || 0, curve.top) * 1.02;
    context.fillStyle = colours.memory;
    context.beginPath();
    context.moveTo(LEFT, y + ROW);
    let column = -1, most = 0;
    for (let i = Math.max(0, firstAfter(curve.at, from) - 1); i < curve.at.length && curve.at[i] < to; i++) {
      const left = Math.max(LEFT, x(curve.at[i])), right = i + 1 < curve.at.length ? x(curve.at[i + 1]) : LEFT + width();
      if (Math.floor(right) === Math.floor(left)) {  // within a pixel: its most
        most = column === Math.floor(left) ? Math.max(most, curve.bytes[i]) : curve.bytes[i];
        column = Math.floor(left);
      } else most = curve.bytes[i];
      const top = y + ROW - (most / scale) * ROW;
      context.lineTo(left, top);
      context.lineTo(Math.min(right, LEFT + width()), top);
    }
    context.lineTo(LEFT + width(), y + ROW);
    context.fill();
    if (row.limit) {
      context.fillStyle = colours.limit;
      context.fillRect(LEFT, y + ROW - (row.limit / scale) * ROW, width(), 1);
    }
  }

  function drawAxis(y) {
    const rough = (to - from) / Math.max(2, width() / 110), unit = 10 ** Math.floor(Math.log10(rough));
    const tick = unit * [1, 2, 5, 10].find((factor) => unit * factor >= rough);
    context.fillStyle = colours.soft;
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      context.fillRect(x(at), y, 1, 4);
      context.textAlign = x(at) < LEFT + 20 ? "left" : x(at) > LEFT + width() - 22 ? "right" : "center";  // at its tick
      context.fillText(time(at).replace(/\.0+ /, " "), x(at), y + 12);
    }
  }

  function rowAt(px, py) {
    for (const panel of data.panels)
      for (const row of panel.rows) if (py >= row.y && py < row.y + ROW + 3) return [panel, row];
    return [null, null];
  }

  function describe(px, py) {
    const [panel, row] = rowAt(px, py), at = ns(px);
    if (!row || px < LEFT || at > panel.step) return "";
    const who = row.label.replace(/ \(x(\d+)\)/, (all, ranks) => ", and " + (ranks - 1) + " equal replicas");
    if (memory && row.memory) {
      const held = row.memory.bytes[Math.max(0, firstAfter(row.memory.at, at) - 1)];
      return who + "\n" + time(at) + ": holds " + bytes(held) + (row.limit ? " of " + bytes(row.limit) : "") +
        "\nat most " + bytes(row.memory.top);
    }
    const low = py > row.y + ROW - Math.max(2, Math.round(ROW / 6)) - 1, reach = (2 * (to - from)) / width();
    let best = -1, idleFrom = 0, idleTo = panel.step;
    for (let i = 0; i < row.start.length; i++) {
      const message = MESSAGES.includes(row.kinds[i]), slack = row.end[i] - row.start[i] < reach ? reach / 2 : 0;
      if (message === low && row.start[i] - slack <= at && row.end[i] + slack >= at && !(best >= 0 && slack)) {
        const lane = row.stage && !low && COMPUTES.includes(row.kinds[i]) ? row.stages.indexOf(row.stage[i]) : -1;
        const pointed = Math.floor(((py - row.y) / (ROW * 5 / 6)) * row.lanes);
        if (lane < 0 || lane === pointed || best < 0) best = i;
      }
      if (!message) {
        if (row.end[i] <= at) idleFrom = Math.max(idleFrom, row.end[i]);
        else if (row.start[i] > at) idleTo = Math.min(idleTo, row.start[i]);
      }
    }
    if (best < 0) return low ? "" : who + "\nbubble: waits " + time(idleTo - idleFrom) + "\n" + time(idleFrom) + " – " + time(idleTo);
    return who + "\n" + labelOf(row, best) + ", " + data.labels[row.kinds[best]] + ": " + time(row.end[best] - row.start[best]) +
      "\n" + time(row.start[best]) + " – " + time(row.end[best]);
  }

  function view(begin, end) {
    const least = Math.max(1, data.step / 1e6), span = Math.min(Math.max(end - begin, least), data.step || 1);
    from = Math.min(Math.max(0, begin), Math.max(0, data.step - span));
    to = from + span;
    draw();
  }
  const zoom = (factor, around = (from + to) / 2) => view(around - (around - from) * factor, around + (to - around) * factor);
  const move = (part) => view(from + part * (to - from), to + part * (to - from));
  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25), all: () => view(0, data.step),
    memory: () => {
      const button = document.querySelector('[data-do="memory"]');
      if (!button) return;
      memory = !memory;
      ROW = memory ? Math.max(NARROW, 24) : NARROW;
      button.setAttribute("aria-pressed", String(memory));
      legend();
      draw();
    },
  };

  function legend() {
    const kinds = new Set(data.panels.flatMap((panel) => panel.rows.flatMap((row) => [...new Set(row.kinds)])));
    const shown = [...COMPUTES].filter((kind) => kinds.has(kind)).map((kind) => [colours[kind], kind + " " + data.labels[kind]]);
    const sums = [...kinds].filter((kind) => !(COMPUTES + MESSAGES + "A").includes(kind)).sort();
    if (sums.length) shown.push([colours.sums, sums.join(", ") + " sums, optimizer"]);
    for (const kind of MESSAGES) if (kinds.has(kind)) shown.push([colours[kind], data.labels[kind]]);
    if (kinds.has("A")) shown.push([colours.wait, "A waiting until all ranks agree"]);
    shown.push([colours.idle, "bubble"]);
    if (data.panels.some((panel) => panel.rows.some((row) => row.chain.size))) shown.push([colours.limit, "longest chain"]);
    const list = memory ? [[colours.memory, "held by a device"], [colours.limit, "its memory"]] : shown;
    document.getElementById("legend").replaceChildren(...list.map(([fill, text]) => {
      const item = document.createElement("li"), box = document.createElement("i");
      box.style.background = fill;
      item.append(box, text);
      return item;
    }));
  }

  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => {
    const [px] = place(event);
    if (px >= LEFT) { drag = { begin: px, now: px }; canvas.setPointerCapture(event.pointerId); }
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = place(event);
    if (drag) { drag.now = px; draw(); }
    const text = drag ? "" : describe(px, py);
    tip.hidden = !text;
    tip.textContent = text;
    if (!text) return;
    const wide = canvas.clientWidth;
    tip.style.left = Math.min(px + 14, wide - tip.offsetWidth) + "px";
    tip.style.top = canvas.offsetTop + py + 16 + "px";
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const ends = [ns(drag.begin), ns(place(event)[0])].sort((a, b) => a - b), wide = Math.abs(drag.now - drag.begin);
    drag = null;
    if (wide > 3) view(ends[0], ends[1]); else draw();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", actions.all);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, ns(place(event)[0]));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all", Home: "all", m: "memory", M: "memory" };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);

  function restyle() { readColours(); legend(); draw(); }
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", restyle);
  window.addEventListener("afterprint", restyle);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  restyle();
  window.autopartView = { view, zoom, move, draw, describe, rows: count, range: () => [from, to] };
})();
