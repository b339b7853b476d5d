"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => Array.from(root.querySelectorAll(selector));

  // Light, dark, or what the system says.
  $("#theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Tabs: one for each run or result; arrow keys, Home and End move between them.
  const tabs = $$("[role=tab]");
  const choose = (tab, focus) => {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", on);
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    }
    if (focus) tab.focus();
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      choose(tabs[(next + tabs.length) % tabs.length], true);
    });
  });

  // Saving: the drawing as it looks now, with its styles inside.
  const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size", "font-weight", "stroke-linejoin"];
  const csv = (card) => JSON.parse($("script.csv", card).textContent);
  const visible = (card) => $$(".plot svg", card).find((svg) => svg.getClientRects().length);
  const standalone = (svg) => {
    const copy = svg.cloneNode(true);
    const from = [svg, ...$$("*", svg)];
    [copy, ...$$("*", copy)].forEach((node, index) => {
      const style = getComputedStyle(from[index]);
      for (const name of KEPT) node.setAttribute(name, style.getPropertyValue(name));
      node.removeAttribute("class");
    });
    const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    back.setAttribute("width", "100%");
    back.setAttribute("height", "100%");
    back.setAttribute("fill", getComputedStyle(svg.closest(".card")).backgroundColor);
    copy.insertBefore(back, copy.firstChild);
    return new XMLSerializer().serializeToString(copy);
  };
  const download = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const saved = (kind, card) => {
    const name = card.dataset.key;
    if (kind === "csv") return Promise.resolve([new Blob([csv(card)], { type: "text/csv" }), `${name}.csv`]);
    const svg = visible(card);
    const blob = new Blob([standalone(svg)], { type: "image/svg+xml" });
    if (kind === "svg") return Promise.resolve([blob, `${name}.svg`]);
    return new Promise((resolve) => {
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        canvas.width = 2 * svg.viewBox.baseVal.width;
        canvas.height = 2 * svg.viewBox.baseVal.height;
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        URL.revokeObjectURL(image.src);
        canvas.toBlob((png) => resolve([png, `${name}.png`]));
      };
      image.src = URL.createObjectURL(blob);
    });
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-save]");
    if (button) saved(button.dataset.save, button.closest(".card")).then(([blob, name]) => download(blob, name));
  });
  window.runflatSaved = saved; // for tests

  // Pointing at lines, or walking over them with the arrow keys: the values there.
  const series = new WeakMap();
  const lines = (card) => {
    if (!series.has(card)) {
      const rows = csv(card).trim().split("\n").slice(1);
      const found = new Map();
      for (const row of rows) {
        const cells = row.match(/("([^"]|"")*"|[^,]*)(,|$)/g).map((cell) => cell.replace(/,$/, "").replace(/^"|"$/g, "").replace(/""/g, '"'));
        if (!found.has(cells[0])) found.set(cells[0], { x: [], y: [] });
        if (cells[2] === "") continue;
        found.get(cells[0]).x.push(Number(cells[1]));
        found.get(cells[0]).y.push(Number(cells[2]));
      }
      series.set(card, found);
    }
    return series.get(card);
  };
  const people = (value, unit) => {
    if (unit === "%") return `${Number((100 * value).toPrecision(Math.abs(value) >= 0.1 ? 4 : 3))} %`;
    for (const [sign, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (Math.abs(value) >= factor && !(sign === "k" && Math.abs(value) < 1e4)) return `${Number((value / factor).toPrecision(4))} ${sign}${unit}`.trim();
    }
    return `${Number(value.toPrecision(4))} ${unit}`.trim();
  };
  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  };
  const point = (plot, share) => {
    const card = plot.closest(".card");
    const svg = visible(card);
    if (!svg || !svg.dataset.box) return;
    const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
    const [x0, x1] = svg.dataset.x.split(" ").map(Number);
    const log = svg.dataset.log[0] === "1";
    plot.dataset.share = share = Math.min(Math.max(share, 0), 1);
    const x = log ? 10 ** (Math.log10(x0) + share * (Math.log10(x1) - Math.log10(x0))) : x0 + share * (x1 - x0);
    const said = [];
    let at = x;
    for (const [label, line] of lines(card)) {
      if (!line.x.length) continue;
      const index = nearest(line.x, x);
      if (!said.length) at = line.x[index];
      said.push(`${label}: ${people(line.y[index], svg.dataset.unit)}`);
    }
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const tip = $(".tip", plot), cross = $(".cross", plot);
    const pixel = (left + share * (right - left)) * scale;
    tip.textContent = `${card.dataset.x}: ${people(at, "")}\n${said.join("\n")}`;
    tip.style.display = cross.style.display = "block";
    tip.style.left = `${Math.min(pixel + 10, plot.clientWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${top * scale}px`;
    cross.style.left = `${pixel}px`;
    cross.style.top = `${top * scale}px`;
    cross.style.height = `${(bottom - top) * scale}px`;
  };
  const hide = (plot) => $$(".tip,.cross", plot).forEach((node) => { node.style.display = "none"; });
  const bindLines = (root) => { for (const plot of $$(".plot[data-lines]", root)) {
    plot.addEventListener("pointermove", (event) => {
      const svg = visible(plot.closest(".card"));
      const [left, , right] = svg.dataset.box.split(" ").map(Number);
      const rect = svg.getBoundingClientRect();
      const x = ((event.clientX - rect.left) * svg.viewBox.baseVal.width) / rect.width;
      point(plot, (x - left) / (right - left));
    });
    plot.addEventListener("pointerleave", () => hide(plot));
    plot.addEventListener("blur", () => hide(plot));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -0.02, ArrowRight: 0.02, Home: -2, End: 2 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      point(plot, Number(plot.dataset.share || 0) + move);
    });
  } };
  bindLines(document);

  // The device map: frames are changes of looks; going back starts over from the first.
  const maps = new Map();
  const STATE = 1, PLACE = 2, UNITS = 3, POWER = 4;
  const openMap = (card) => {
    const map = { card, ...JSON.parse($("script.frames", card).textContent), at: -1, cells: [], blocks: [] };
    map.names = JSON.parse($("script.devices", card).textContent);
    map.rects = map.names.map(() => []);
    map.ids = map.names.map(() => []);
    map.units = map.names.map(() => []);
    map.powers = map.names.map(() => []);
    for (const node of $$("[data-c]", card)) (node.tagName === "rect" ? map.rects : map.ids)[node.dataset.c].push(node);
    for (const node of $$("[data-u]", card)) map.units[node.dataset.u].push(node);
    for (const node of $$("[data-p]", card)) map.powers[node.dataset.p].push(node);
    map.heads = {};
    for (const node of $$("[data-b]", card)) (map.heads[node.dataset.b] ||= []).push(node);
    map.blockNames = JSON.parse($("script.blocks", card).textContent);
    map.dense = !$("[data-u]", card);
    return map;
  };
  const paint = (map, index, look) => {
    const [letter, state, , units, power] = map.looks[look];
    for (const rect of map.rects[index] || []) rect.setAttribute("class", `cell m-${letter}`);
    for (const id of map.ids[index] || []) id.setAttribute("class", `id t-${letter}`);
    for (const text of map.units[index] || []) {
      text.setAttribute("class", `tiny t-${letter}`);
      text.textContent = state === "active" ? units.split(",")[0] || state : state;
    }
    for (const text of map.powers[index] || []) {
      text.setAttribute("class", `tiny t-${letter}`);
      text.textContent = power.split(" limit")[0];
    }
  };
  const title = (map, block, words) => {
    const name = map.blockNames[block];
    if (!map.dense) return words ? `${name} · ${words}` : name;
    return `${name.replace("replica ", "r")} ${words.split(" · ")[0].replace(" of ", "/")}`.trim();
  };
  const seek = (map, wanted) => {
    const cells = new Map(), blocks = new Map();
    for (let index = wanted > map.at ? map.at + 1 : 0; index <= wanted; index++) {
      for (const [cell, look] of map.frames[index][2]) cells.set(cell, look);
      for (const [block, words] of map.frames[index][3]) blocks.set(block, words);
    }
    for (const [cell, look] of cells) if (map.cells[cell] !== look) { map.cells[cell] = look; paint(map, cell, look); }
    for (const [block, words] of blocks) {
      map.blocks[block] = words;
      const degree = words.match(/TP (\d+) of (\d+)/);
      for (const node of map.heads[block] || []) {
        node.textContent = title(map, block, words);
        node.classList.toggle("hit", Boolean(words) && (!degree || degree[1] !== degree[2]));
      }
    }
    map.at = wanted;
    const [time, label] = map.frames[wanted];
    const counts = {};
    for (const look of map.cells) counts[map.looks[look][STATE]] = (counts[map.looks[look][STATE]] || 0) + 1;
    $(".when", map.card).replaceChildren(
      Object.assign(document.createElement("b"), { textContent: `${time.toFixed(time < 1000 ? 2 : 0)} s` }),
      ` ${label}. `,
      Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", "),
    );
    $("input[type=range]", map.card).setAttribute("aria-valuetext", `${time.toFixed(2)} seconds: ${label}`);
  };
  const tell = (map, index) => {
    const look = map.looks[map.cells[index]];
    if (!look) return;
    const place = look[PLACE] ? `, at ${look[PLACE]}` : "";
    const power = look[POWER] ? `, ${look[POWER]}` : "";
    map.told = index;
    $(".cellinfo", map.card).textContent = `${map.names[index]}: ${look[STATE]}${place}${look[UNITS] ? `, holds ${look[UNITS]}` : ""}${power}`;
  };
  const startMap = (card) => {
    const map = openMap(card);
    const slider = $("input[type=range]", card);
    maps.set(card, map);
    slider.addEventListener("input", () => seek(map, Number(slider.value)));
    for (const button of $$("[data-move]", card)) {
      button.addEventListener("click", () => {
        slider.value = Number(slider.value) + Number(button.dataset.move);
        seek(map, Number(slider.value));
      });
    }
    $(".plot", card).addEventListener("pointerover", (event) => {
      const index = event.target.dataset.c ?? event.target.dataset.u ?? event.target.dataset.p;
      if (index !== undefined) tell(map, Number(index));
    });
    $(".plot", card).addEventListener("keydown", (event) => {
      const last = map.names.length - 1, now = map.told ?? -1;
      const index = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: last }[event.key];
      if (index === undefined) return;
      event.preventDefault();
      tell(map, Math.min(Math.max(index, 0), last));
    });
    seek(map, Number(slider.value));
  };
  $$(".card.map").forEach(startMap);
  window.runflatPage = { maps, seek, bindLines }; // for the live page
})();
