// Tooltips for the points of the drawings, and legends that hide series. Makes no requests.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  const NEAR = 26; // in the drawing's own units

  for (const svg of document.querySelectorAll("svg[data-points]")) {
    const points = JSON.parse(svg.dataset.points); // [x, y, text, series]
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("r", 4);
    ring.setAttribute("class", "ring");
    let at = -1;

    const seen = ([, , , series]) => {
      const part = svg.querySelector(`[data-series="${series}"]`);
      return !part || part.style.display !== "none";
    };
    const hide = () => { at = -1; tip.hidden = true; ring.remove(); };
    const show = (k) => {
      const [x, y, text] = points[at = k];
      ring.setAttribute("cx", x);
      ring.setAttribute("cy", y);
      svg.append(ring);
      tip.textContent = text;
      tip.hidden = false;
      const place = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
      const left = Math.min(Math.max(place.x - tip.offsetWidth / 2, 4), document.documentElement.clientWidth - tip.offsetWidth - 4);
      const above = place.y - tip.offsetHeight - 12;
      tip.style.left = `${left + scrollX}px`;
      tip.style.top = `${(above > 4 ? above : place.y + 14) + scrollY}px`;
    };

    svg.tabIndex = 0;
    svg.addEventListener("pointermove", (event) => {
      const here = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = -1, least = NEAR;
      points.forEach((point, k) => {
        const far = Math.hypot(point[0] - here.x, point[1] - here.y);
        if (far < least && seen(point)) { best = k; least = far; }
      });
      if (best < 0) hide(); else if (best !== at) show(best);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      for (let n = 0, k = at; n < points.length; n++) {
        k = (k + step + points.length + (k < 0 && step < 0 ? 1 : 0)) % points.length;
        if (seen(points[k])) { show(k); break; }
      }
    });
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", on);
      for (const part of button.closest("[data-filter]").querySelectorAll(`svg [data-series="${button.dataset.series}"]`)) {
        part.style.display = on ? "" : "none";
      }
    });
  }
})();
