// Pages that are not shown are drawn when they first are, or once the browser has nothing else to do: drawing the
// controls of all pages takes longer than the page that a person waits for.
(function () {
  const React = window.React;
  const LOOK_MS = 100, QUIET = 8; // so many looks without an answer in between: the shown page is drawn; assumptions

  // Addresses of no page are answered by the server.
  const shown = () => document.documentElement.dataset.page
    || window.location.pathname.replace(/^\/+|\/+$/g, "") || "frontier";

  function Later(props) {
    const [drawn, setDrawn] = React.useState(() => shown() === props.page);
    React.useEffect(() => {
      if (drawn) return undefined;
      const look = () => {
        if (shown() === props.page) setDrawn(true);
      };
      const rest = () => setDrawn(true);
      document.addEventListener("tensoropt-page", look);
      document.addEventListener("tensoropt-rest", rest);
      look();
      return () => {
        document.removeEventListener("tensoropt-page", look);
        document.removeEventListener("tensoropt-rest", rest);
      };
    }, [drawn]);
    return drawn ? props.children : null;
  }
  window.tensoropt_components = { Later };

  // At rest: nothing was fetched meanwhile. Looks are counted, not seconds, as none happens while a script runs.
  let quiet = 0;
  new PerformanceObserver(() => { quiet = 0; }).observe({ type: "resource" });
  const timer = window.setInterval(() => {
    quiet += 1;
    if (quiet < QUIET || !document.querySelector(`#page-${shown()}`)?.childElementCount) return;
    window.clearInterval(timer);
    const rest = () => document.dispatchEvent(new Event("tensoropt-rest"));
    if (window.requestIdleCallback) window.requestIdleCallback(rest, { timeout: 2000 });
    else rest();
  }, LOOK_MS);
})();
