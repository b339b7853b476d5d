"use strict";
(() => {
  const { maps, seek, bindLines } = window.runflatPage;
  const state = document.getElementById("state");
  const source = new EventSource("events");
  source.onmessage = (event) => {
    const said = JSON.parse(event.data);
    state.textContent = said.state;
    for (const [id, html] of Object.entries(said.html)) {
      const part = document.getElementById(id);
      const open = Array.from(part.querySelectorAll("details[open]"), (one) => one.closest("[data-key]").dataset.key);
      part.innerHTML = html;
      for (const key of open) {
        const details = part.querySelector(`[data-key="${key}"] details`);
        if (details) details.open = true;
      }
      bindLines(part);
    }
    for (const map of maps.values()) {
      const slider = map.card.querySelector("input[type=range]");
      const follows = Number(slider.value) === map.frames.length - 1;
      Object.assign(map, said.map, { at: -1 });
      map.cells = [];
      slider.max = map.frames.length - 1;
      if (follows) slider.value = map.frames.length - 1;
      seek(map, Number(slider.value));
    }
  };
  source.onerror = () => {
    if (state.textContent !== "finished") state.textContent = "no connection: the run has ended, or its machine is out of reach";
    else source.close();
  };
  const form = document.getElementById("ask");
  if (!form) return;
  const sure = document.getElementById("sure");
  const answer = document.getElementById("answer");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { device, action } = Object.fromEntries(new FormData(form));
    document.getElementById("sure-text").textContent = `Really ask ${device} to ${action}?`;
    // Not by the dialog's close event: that comes late, and after Escape with the answer before.
    sure.querySelector("form").onsubmit = async (said) => {
      if (said.submitter.value !== "yes") return;
      const token = new URLSearchParams(location.hash.slice(1)).get("token") || prompt("token");
      const headers = { "Content-Type": "application/json", "X-Runflat-Token": token || "" };
      const reply = await fetch("device", { method: "POST", headers, body: JSON.stringify({ action, device, confirm: device }) });
      answer.textContent = (await reply.json()).text;
    };
    sure.showModal();
  });
})();
