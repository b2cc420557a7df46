// Sets the colour scheme, and whether the window is narrow, before anything is painted; cookies tell the server before it
// is asked for the layout.
(function () {
  let chosen = null;
  try {
    chosen = JSON.parse(window.localStorage.getItem("chosen-scheme"));
  } catch (error) {
    // Storage that is forbidden, or holds something else: as the system has it.
  }
  const system = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const scheme = chosen === "dark" || chosen === "light" ? chosen : system;
  document.documentElement.dataset.scheme = scheme;
  document.cookie = "tensoropt-scheme=" + scheme + "; path=/; SameSite=Strict";
  document.cookie = "tensoropt-narrow=" + (window.innerWidth < 700 ? "1" : "") + "; path=/; SameSite=Strict";
})();
