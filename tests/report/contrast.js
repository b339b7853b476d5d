// For each visible text of the page: is its contrast with what lies behind it at least 4.5?
(() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (node) => {
    if (node instanceof SVGElement && node.dataset.c !== undefined || node.dataset?.u !== undefined || node.dataset?.p !== undefined) {
      const rect = node.closest("svg").querySelector(`rect[data-c="${node.dataset.c ?? node.dataset.u ?? node.dataset.p}"]`);
      return parse(getComputedStyle(rect).fill);
    }
    for (let one = node; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.getClientRects().length || ["SCRIPT", "STYLE", "TITLE", "title"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink.slice(0, 3)), light(behind(node).slice(0, 3))].sort((x, y) => y - x);
    seen += 1;
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push([walker.currentNode.textContent.trim(), (a + 0.05) / (b + 0.05), node.className.baseVal ?? node.className]);
  }
  return { seen, bad };
})()
