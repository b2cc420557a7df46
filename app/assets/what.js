// What a term means, in one bubble beside the "?" that the pointer, a finger or the keyboard is on. A component
// of its own for each "?" made every change of the page look through the whole layout again (1 s per key).
(function () {
  const APART = 6; // px
  const bubble = document.createElement("div");
  bubble.className = "bubble";
  let of = null;

  const place = () => {
    if (!of) return;
    const at = of.getBoundingClientRect();
    const left = at.left + (at.width - bubble.offsetWidth) / 2;
    const right = document.documentElement.clientWidth - bubble.offsetWidth - APART;
    const above = at.top - bubble.offsetHeight - APART;
    bubble.style.left = `${Math.max(APART, Math.min(left, right))}px`;
    bubble.style.top = `${above > 0 ? above : at.bottom + APART}px`;
  };
  const show = (event) => {
    const mark = event.target.closest?.(".what");
    if (!mark) return;
    of = mark;
    bubble.textContent = mark.dataset.said;
    document.body.append(bubble);
    place();
  };
  const hide = (event) => {
    if (!of || (event.target.closest && event.target.closest(".what") !== of)) return;
    of = null;
    bubble.remove();
  };
  ["pointerover", "focusin", "click"].forEach((kind) => document.addEventListener(kind, show));
  ["pointerout", "focusout"].forEach((kind) => document.addEventListener(kind, hide));
  document.addEventListener("scroll", place, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    of = null;
    bubble.remove();
  });
})();
