// Two fingers on a map. One finger scrolls the page; a gesture begins with the second, and both take part.
let pinching = false;
function beginPinch(event) {
  if (!event.isTrusted || event.touches.length !== 2) return;
  pinching = true;
  event.stopImmediatePropagation();
  const touches = [...event.touches];
  event.target.dispatchEvent(new TouchEvent("touchstart", { touches, changedTouches: touches, cancelable: true }));
}
function goOnPinching(event) {
  if (!pinching) event.stopImmediatePropagation();
  pinching &&= event.touches.length > 0;
}

export function pinchable(canvas) {
  canvas.addEventListener("touchstart", beginPinch, { capture: true });
  for (const kind of ["touchmove", "touchend", "touchcancel"]) {
    canvas.addEventListener(kind, goOnPinching, { capture: true });
  }
}
