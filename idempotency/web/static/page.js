// What the page does without a person: it follows the flow, looks again at a bulk replay, and goes on with one that is to go on.
// All of it also works by reloading. The HTML comes from this server, which has escaped what it writes.
"use strict";

for (const part of document.querySelectorAll("[data-live]")) {
  const source = new EventSource(part.dataset.live);
  source.onmessage = (event) => {
    const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    part.innerHTML = event.data;
    part.classList.remove("stale"); // a stream that is open has shown nothing yet
    if (focused) part.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    part.dataset.since = String(Date.now());
  };
  source.onerror = () => part.classList.add("stale");
}

const again = document.querySelector("[data-reload]");
if (again) setTimeout(() => location.reload(), Number(again.dataset.reload) * 1000);

const next = document.querySelector("form[data-submit]");
if (next) setTimeout(() => next.requestSubmit(), 1000);
