// A notice of the desktop when a job ends. The browser is asked by the button only, never when a page is loaded, and
// what was chosen is kept in this browser.
(function () {
  const KEY = "tensoropt-notify";
  const allowed = () => "Notification" in window && window.Notification.permission === "granted";
  const wanted = () => window.localStorage.getItem(KEY) === "yes";

  function show(words) {
    const button = document.getElementById("notify"), said = document.getElementById("notify-said");
    if (!button || !said) return;
    const on = wanted() && allowed();
    button.textContent = on ? "Stop notifying me" : "Notify me when a job ends";
    said.textContent = words !== undefined ? words : on ? "This desktop is notified when a job ends." : "";
  }

  function refused() {
    if (!window.isSecureContext) {
      return "Browsers allow notices from 127.0.0.1 and from https only; a notice appears on this page instead.";
    }
    return "This browser does not allow notices from here; allow them in its settings for this site.";
  }

  async function toggle() {
    if (wanted() && allowed()) {
      window.localStorage.removeItem(KEY);
      return show("Off.");
    }
    if (!("Notification" in window) || !window.isSecureContext) return show(refused());
    const answer = await window.Notification.requestPermission();
    if (answer !== "granted") return show(refused());
    window.localStorage.setItem(KEY, "yes");
    return show();
  }

  function tell(words) {
    if (!words || !wanted() || !allowed()) return;
    // Of several pages that see the same job end, the desktop shows one notice: they have one tag.
    const notice = new window.Notification("TensorOpt", { body: words, tag: words });
    notice.onclick = () => {
      window.focus();
      notice.close();
    };
  }

  document.addEventListener("click", (event) => {
    if (event.target.closest && event.target.closest("#notify")) toggle();
  });

  // The page's own notice says what ended; it is read where it appears.
  function watch() {
    const place = document.getElementById("notice");
    if (!place) return window.setTimeout(watch, 300);
    show();
    let last = "";
    return new MutationObserver(() => {
      const span = place.querySelector("span");
      const words = span ? span.textContent.trim() : "";
      if (words !== last) tell(words);
      last = words;
    }).observe(place, { childList: true, subtree: true, characterData: true });
  }
  watch();
  // What has just been said of a click stays said.
  window.addEventListener("tensoropt-made", () => { if (!document.getElementById("notify-said")?.textContent) show(); });
})();
