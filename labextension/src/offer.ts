/**
 * The other amounts of its GPU that a running session can request, and the requests for them. Pure.
 */
import type { ISession, ResizeRequest } from './tokens';

export const MEMORY_STEP_MIB = 128;
export const COMPUTE_STEP_PERCENT = 5;

/** The fields of the form: fGPU within the range that is possible now, or exact amounts without a known range. */
export type ResizeOffer =
  | { kind: 'fgpu'; now: string; min: string; max: string; step: string }
  | { kind: 'exact'; memoryMib: number; computePercent: number | null }
  | { kind: 'none' };

/** Return the offer for a session, or null if its amount is fixed. */
export function resizeOffer(session: ISession): ResizeOffer | null {
  const { resize, fgpu, amount, gpu_memory_mib } = session;
  if (resize === null || resize.why_not !== null || session.id === null) {
    return null;
  }
  if (fgpu !== null && amount === `${fgpu} fGPU`) {
    const { amounts } = resize;
    const [min, next] = amounts;
    const max = amounts[amounts.length - 1];
    return min === undefined || next === undefined || max === undefined
      ? { kind: 'none' }
      : { kind: 'fgpu', now: fgpu, min, max, step: difference(next, min) };
  }
  if (gpu_memory_mib === null) {
    return null;
  }
  const asksCompute = amount !== null && amount.includes('%');
  return {
    kind: 'exact',
    memoryMib: gpu_memory_mib,
    computePercent: asksCompute ? session.compute_percent : null
  };
}

/** Return the request for the fields' texts; the service checks the amount. */
export function requestFromFields(offer: ResizeOffer, texts: Record<string, string>): ResizeRequest {
  if (offer.kind !== 'exact') {
    return { fgpu: texts['fgpu'] ?? '' };
  }
  const memory = { gpu_memory_mib: Number(texts['gpu_memory_mib']) };
  return offer.computePercent === null
    ? memory
    : { ...memory, compute_percent: Number(texts['compute_percent']) };
}

/** Return the request for the amount in a launch's options. */
export function requestFromOptions(options: Record<string, string>): ResizeRequest {
  const { fgpu, gpu_memory_mib, compute_percent } = options;
  if (fgpu !== undefined) {
    return { fgpu };
  }
  const memory = { gpu_memory_mib: Number(gpu_memory_mib) };
  return compute_percent === undefined
    ? memory
    : { ...memory, compute_percent: Number(compute_percent) };
}

/** Return the exact difference of two decimals; as binary numbers 0.3 - 0.2 is not 0.1. */
function difference(more: string, less: string): string {
  const thousandths = Math.round(Number(more) * 1000) - Math.round(Number(less) * 1000);
  return String(thousandths / 1000);
}
