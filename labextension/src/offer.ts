/**
 * Which other amounts of its GPU a running session is offered, and in which terms it asks for them. Pure.
 */
import type { ISession, Wanted } from './tokens';

export const MEMORY_STEP_MIB = 128;
export const COMPUTE_STEP_PERCENT = 5;

/** The fields of an offer: of fGPU with what is possible now, or exact, where what is possible is not known before. */
export type Offer =
  | { kind: 'fgpu'; now: string; least: string; most: string; step: string }
  | { kind: 'exact'; memoryMib: number; computePercent: number | null }
  | { kind: 'nothing' };

/** Return what a session is offered, or null where it keeps its slice whatever is asked for. */
export function offerOf(session: ISession): Offer | null {
  const { resize, fgpu, amount, gpu_memory_mib } = session;
  if (resize === null || resize.why_not !== null || session.id === null) {
    return null;
  }
  if (fgpu !== null && amount === `${fgpu} fGPU`) {
    const { amounts } = resize;
    const [least, next] = amounts;
    const most = amounts[amounts.length - 1];
    return least === undefined || next === undefined || most === undefined
      ? { kind: 'nothing' }
      : { kind: 'fgpu', now: fgpu, least, most, step: difference(next, least) };
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

/** Return what to send for the fields' texts: the service says what is wrong with an amount. */
export function wantedOf(offer: Offer, texts: Record<string, string>): Wanted {
  if (offer.kind !== 'exact') {
    return { fgpu: texts['fgpu'] ?? '' };
  }
  const memory = { gpu_memory_mib: Number(texts['gpu_memory_mib']) };
  return offer.computePercent === null
    ? memory
    : { ...memory, compute_percent: Number(texts['compute_percent']) };
}

/** Return what to send for the options of a launch: the amount alone, in the terms that they are in. */
export function wantedFrom(options: Record<string, string>): Wanted {
  const { fgpu, gpu_memory_mib, compute_percent } = options;
  if (fgpu !== undefined) {
    return { fgpu };
  }
  const memory = { gpu_memory_mib: Number(gpu_memory_mib) };
  return compute_percent === undefined
    ? memory
    : { ...memory, compute_percent: Number(compute_percent) };
}

/** Return the exact difference of two decimals: in binary 0.3 - 0.2 is no step of anything. */
function difference(more: string, less: string): string {
  const thousandths = Math.round(Number(more) * 1000) - Math.round(Number(less) * 1000);
  return String(thousandths / 1000);
}
